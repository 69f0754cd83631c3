"""The options of layer skipping, the same on every engine."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from freedraft.config import PluginOptions, UserPath
from freedraft.cost.measured import Measured
from freedraft.draft_model import Window
from freedraft.extras import require
from freedraft.step import EngineContext
from layerskip_plugin.lookahead.base import Confidence, FixedLength, Lookahead
from layerskip_plugin.lookahead.cost import Cost
from layerskip_plugin.lookahead.disco import Classifier, Disco
from layerskip_plugin.selection.base import Selection, Static
from layerskip_plugin.selection.knapsack import Knapsack, Plan
from layerskip_plugin.selection.knn import Domains, Knn
from layerskip_plugin.selection.online_search import KnapSpec, OnlineSearch, Swift
from layerskip_plugin.skip_set import SkipSet, model_fingerprint, text_config

MAX_SKIP_SETS = 4
# Commands that write the files of options.
MADE_BY = {
    "skip_set": "'freedraft calibrate skip-set'",
    "selection_file": "'freedraft calibrate knn' or 'freedraft calibrate knapsack'",
    "disco": "'freedraft calibrate disco'",
}
# As published, the first and the last layer are kept: drafts without them would be useless.
SWIFT_KEEPS = 2  # sublayers at each end


def _paths(value: object) -> object:
    """One path, several in a list, or several in one text with commas between them (flags, environment)."""
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    elif value is None or isinstance(value, Path):
        value = [value] if value else []
    return tuple(Path(part).expanduser() for part in value) if isinstance(value, (list, tuple)) else value


class LayerSkipOptions(PluginOptions):
    """Options of layer skipping.

    Attributes:
        selection: which sublayers to skip. "static": those of `skip_set`; "swift": a search while serving, on the
            traffic; "knn": the set of the domain nearest to a prompt; "knapsack": the set and draft length of the
            present context length, by the plan in `selection_file`, or by KnapSpec's search while serving.
        selection_file: file for "knn" or "knapsack", written by `freedraft calibrate knn` or `calibrate knapsack`.
        search_share: largest share of serving time that a search may take.
        skip_ratio: share of all sublayers that "swift" skips (its r; the paper's models of 7 to 70 B skip .4 to .5).
        skip_set: files with skip sets, at most 4 (comma-separated in a variable); requests use the first unless they
            name another.
        window: tokens of a request's KV cache that draft passes read, the first `sinks` and the newest, in whole pages.
            None: all.
        sinks: tokens of `window` from the start of the request (attention sinks).
        lookahead: policy of draft lengths. "cost" goes on while one more token pays, and does not draft where none
            does.
        threshold: top-1 probability below which policy "confidence" stops drafting. None: .7.
        disco: file of the classifier of policy "disco", written by `freedraft calibrate disco`.
        record: file for recorded verifications of the first skip set's drafts, the input of `freedraft calibrate
            disco`.
        shape: shape of drafts, "chain", or "tree": with the draft's other candidates (SWIFT's dynamic verification);
            "auto" is "tree" if the engine's attention verifies trees in all its steps (vLLM: in model runner V2, where
            drafts end early; with FlashAttention, freedraft's kernel verifies trees, on "tree" only).
        length: draft length of lookahead "fixed". None: num_speculative_tokens on vLLM, 5 on SGLang.
    """

    source_name: ClassVar[str] = "layerskip"

    selection: Literal["static", "swift", "knn", "knapsack"] = "static"
    selection_file: UserPath = None
    search_share: float = Field(default=0.01, gt=0.0, le=0.5)
    skip_ratio: float = Field(default=Swift.ratio, gt=0.0, lt=1.0)
    skip_set: Annotated[tuple[Path, ...], BeforeValidator(_paths)] = ()
    window: int | None = Field(default=None, ge=1)
    sinks: int = Field(default=16, ge=0)
    lookahead: Literal["cost", "confidence", "disco", "fixed"] = "cost"
    threshold: float | None = Field(default=None, ge=0.0, le=1.0)
    disco: UserPath = None
    record: UserPath = None
    shape: Literal["auto", "tree", "chain"] = "auto"
    length: int | None = Field(default=None, ge=1, le=255)

    @field_validator("skip_set", "selection_file", "disco")
    @classmethod
    def _files_exist(cls, value: Any, info: ValidationInfo) -> Any:
        paths = value if isinstance(value, tuple) else (value,) if value else ()
        if len(paths) > MAX_SKIP_SETS:
            raise ValueError(f"names {len(paths)} skip sets: at most {MAX_SKIP_SETS} are kept ready")
        for path in paths:
            if not path.is_file():
                raise ValueError(f"{path} is not a file: make one with {MADE_BY[str(info.field_name)]}")
        return value

    @field_validator("record")
    @classmethod
    def _folder_exists(cls, path: Path | None) -> Path | None:
        if path is not None and not path.parent.is_dir():
            raise ValueError(f"is in a folder that does not exist: create {path.parent} first")
        return path

    def skip_sets(self, layers: int, model: str) -> dict[str, SkipSet]:
        """The skip sets by name (the stem of their file), in order; one empty set, "", when none is given. Raises
        ValueError if a file is no skip set or one of another model, or two have the same name."""
        sets: dict[str, SkipSet] = {}
        for path in self.skip_set:
            if path.stem in sets:
                raise ValueError(
                    f"option 'skip_set': two files are called {path.stem}: rename one, requests choose by it"
                )
            sets[path.stem] = SkipSet.load(path, layers, model)
        return sets or {"": SkipSet.empty(layers, model)}

    def draft_window(self, context: EngineContext) -> Window | None:
        """The window of draft passes. Raises ValueError for one that does not fit the model or its pages."""
        if self.window is None:
            return None
        config, page_size = text_config(context.hf_config), context.page_size or 1
        slides = getattr(config, "use_sliding_window", True) is not False
        attended = getattr(config, "sliding_window", None) if slides else None
        one = f"option 'window' is {self.window} tokens"
        for wrong, why in (
            (getattr(config, "dual_chunk_attention_config", None), "option 'window' does not go with dual chunk "
             "attention: remove it"),
            (self.sinks >= self.window, f"option 'sinks' is {self.sinks} and leaves nothing of a window of "
             f"{self.window} tokens: set it to 16"),
            (self.window < page_size, f"{one}, less than a page of the KV cache: set {page_size} or more"),
            (attended is not None and self.window >= attended, f"{one}, and this model looks back {attended} at most: "
             "set fewer"),
        ):  # fmt: skip
            if wrong:
                raise ValueError(why)
        return Window(self.sinks, self.window - self.sinks)

    @property
    def shape_at_one_length(self) -> str:
        """The shape where all requests of a step verify the same number of draft tokens: chains if all fill it."""
        fills = self.lookahead == "cost" or (self.lookahead == "fixed" and self.length is None)
        return "chain" if fills else self.shape

    def make_selection(self, config: Any, hardware: str | None = None) -> Selection:
        """The selection of these options. Raises ValueError, one line, if a file is missing, damaged, or of another
        model or hardware, or options conflict."""
        name, file = self.selection, self.selection_file
        layers, model = text_config(config).num_hidden_layers, model_fingerprint(config)
        for option, conflicts in (
            ("selection_file", name in ("static", "swift") and file),
            ("skip_set", name != "static" and self.skip_set),
        ):
            if conflicts:
                raise ValueError(f"option '{option}' does not go with selection {name}: remove one of the two")
        if name == "static":
            return Static(self.skip_sets(layers, model))
        if name == "knn":
            if file is None:
                raise ValueError(
                    "selection knn needs the option 'selection_file': make one with freedraft calibrate knn"
                )
            return Knn(Domains.load(file, layers, model))
        if file is not None:
            return Knapsack(Plan.load(file, layers, model, hardware), measured=self.lookahead == "cost")
        search: OnlineSearch = KnapSpec(layers, model)
        if name == "swift":
            # They take seconds to import: at start, not while serving.
            require("selection swift", "calibrate", "sklearn.gaussian_process")
            ends = (*range(SWIFT_KEEPS), *range(2 * layers - SWIFT_KEEPS, 2 * layers))
            if round(self.skip_ratio * 2 * layers) > (most := 2 * layers - len(ends)):
                raise ValueError(
                    f"option 'skip_ratio' {self.skip_ratio} is too much of {2 * layers} sublayers, as the first and "
                    f"last layer are kept: set {most / (2 * layers):.2g} or less"
                )
            search = Swift(layers, model, self.skip_ratio, ends)
        search.share = self.search_share
        return search

    def make_lookahead(
        self, context: EngineContext, recipes: Sequence[SkipSet], measured: Measured | None
    ) -> Lookahead:
        """The lookahead policy of these options; measured: None if nothing is, with one length for all steps. Raises
        ValueError, one line, if the classifier is missing, damaged or of another model."""
        if self.lookahead == "cost":
            most, scheduled = context.max_draft_tokens, context.lengths is not None
            if measured is None:
                return FixedLength(most)
            return Cost(measured, recipes, most, context.widths, scheduled=scheduled)
        if self.lookahead == "fixed":
            return FixedLength(self.length or (context.max_draft_tokens if context.widths is None else 5))
        if self.lookahead == "disco":
            if self.disco is None:
                raise ValueError("lookahead disco needs a classifier: train one with freedraft calibrate disco")
            return Disco(Classifier.load(self.disco, model_fingerprint(context.hf_config)))
        return Confidence() if self.threshold is None else Confidence(self.threshold)


def check(options: LayerSkipOptions, context: EngineContext) -> None:
    """Raise ValueError, before the engine starts: one line that names the option or file and the remedy."""
    if options.selection == "static" and not options.skip_set and options.window is None:
        raise ValueError("drafts would be of the whole model: set option 'skip_set', 'window' or 'selection'")
    searches = options.selection == "swift" or (options.selection == "knapsack" and options.selection_file is None)
    if context.tensor_parallel > 1 and searches:
        raise ValueError(
            f"selection '{options.selection}' searches on one tensor-parallel rank only, not "
            f"{context.tensor_parallel}: calibrate a set, or use 'knn'"
        )
    options.make_selection(context.hf_config, context.hardware)
    options.make_lookahead(context, [], None)
    options.draft_window(context)
