"""The options of SSSD, the same on every engine."""

from functools import cached_property
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, field_validator

from freedraft.config import PluginOptions, UserPath, expand_path
from freedraft.cost.controller import Controller, Policy
from freedraft.cost.policies import make_controller
from freedraft.step import EngineContext
from sssd_plugin.datastore.disk.format import Isolation
from sssd_plugin.datastore.disk.remote import local_copy

Scoring = Literal["learned", "paper"]


def _store(value: object) -> object:
    return value.strip() if isinstance(value, str) and "://" in value else expand_path(value)


StorePath = Annotated[Path | str | None, BeforeValidator(_store)]


class SssdOptions(PluginOptions):
    """Options of SSSD.

    Attributes:
        live: learn from finished requests. "memory": until the server ends; "store": also kept in the folder of the
            datastore or at its URL, which may be empty at first; "off".
        datastore: folder of `freedraft datastore build`, or its URL for fsspec (copied to a local cache). With
            `live: store`, servers with the same URL learn from each other.
        datastore_sha256: required digest of the datastore, as `freedraft datastore info` shows it.
        live_tokens: maximum of learnt tokens, in memory (8 to 12 bytes each) and on disk (4 bytes).
        live_max_age: hours after which learnt text is erased; None: never.
        isolation: which requests share learnt text. "salt": those with the same cache_salt (in SGLang also extra_key);
            requests without one share one pool. "strict": requests without one share nothing. "shared": all.
        scoring: "learned" (calibrated probabilities) or "paper" (Algorithms 1-3 with their constants).
        weights: file of the learned scorer; None takes the shipped one.
        hardware: name of a shipped profile, path of a .yaml file, or "auto".
        knee: query tokens per step that cost about nothing; replaces the profile's.
        policy: "auto" takes the draft tokens that maximise expected tokens per second, from measured step times and
            acceptance; "knee" keeps the batch at the knee; "fixed" always drafts as much as the engine allows. None is
            "auto", or "knee" where a knee is given.
        step_times: file that keeps the step times of "auto" between starts; None: not kept.
        shape: shape of drafts; "auto" is "tree" if the engine's attention verifies trees in all its steps, else
            "chain" (with vLLM's FlashAttention, freedraft's kernel verifies trees, on "tree" only).
        recycle: draft from the logits of verified nodes, too: "auto" on SGLang and vLLM's model runner V2; "on" logs a
            warning where there are none; "off".
        recycle_megabytes: memory for recycled logits; the oldest are replaced first.
    """

    source_name: ClassVar[str] = "sssd"

    live: Literal["memory", "store", "off"] = "memory"
    datastore: StorePath = None
    datastore_sha256: str | None = Field(default=None, pattern="^[0-9a-f]{64}$")
    live_tokens: int = Field(default=1 << 22, ge=1 << 14, le=1 << 30)
    live_max_age: float | None = Field(default=None, gt=0.0, le=1e6)
    isolation: Isolation = "salt"
    scoring: Scoring = "learned"
    weights: UserPath = None
    hardware: str = Field(default="auto", min_length=1)
    knee: int | None = Field(default=None, ge=1, le=1_000_000)
    policy: Policy | None = None
    step_times: UserPath = None
    shape: Literal["auto", "tree", "chain"] = "auto"
    recycle: Literal["auto", "on", "off"] = "auto"
    recycle_megabytes: int = Field(default=64, ge=1, le=1 << 16)

    @field_validator("weights")
    @classmethod
    def _weights_exist(cls, weights: Path | None) -> Path | None:
        if weights is not None and not weights.is_file():
            raise ValueError("is not a file: give a file that bench/scorer wrote, or leave it out")
        return weights

    @cached_property
    def static_store(self) -> Path | None:
        """The folder of the built store, or of the local copy of a URL; None without a built store. Raises
        DatastoreError: the URL is unreachable, or has no store."""
        if isinstance(self.datastore, str):
            return None if self.live == "store" else local_copy(self.datastore)
        if self.datastore is not None and self.live == "store" and not (self.datastore / "manifest.json").exists():
            return None
        return self.datastore

    @property
    def effective_policy(self) -> Policy:
        return self.policy or ("auto" if self.knee is None else "knee")

    def make_controller(self, context: EngineContext) -> Controller:
        """Build the controller of these options. Raises ConfigError: `hardware` names no profile."""
        policy = self.effective_policy
        return make_controller(context, policy, hardware=self.hardware, knee=self.knee, step_times=self.step_times)
