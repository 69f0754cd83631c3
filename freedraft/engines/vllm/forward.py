"""`Forward`: runs modules of the target in vLLM's forward context, over its paged KV cache; `Pages`: block tables of a
step's requests. `Step.engine` returns them for draft passes."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from freedraft.engines.draft_round import DraftRanks, T, on_device
from freedraft.engines.vllm.kept_layers import Backbone, UnsupportedModel
from freedraft.step import Step

NO_SLOT = -1  # the KV kernels write nothing for it


class Pages(NamedTuple):
    """The KV blocks of B requests.

    Attributes:
        table: int32 [R, P] on the device, blocks of each row; undefined beyond its request's own.
        rows: intp [B], the rows of the requests; blocks: int64 [B], their numbers of blocks.
        block_size: tokens of a block.
    """

    table: torch.Tensor
    rows: NDArray[np.intp]
    blocks: NDArray[Any]
    block_size: int


class BlockTables(NamedTuple):
    """Block tables of passes over R of a step's requests. whole: int32 [R, P], their blocks; read: int32 [R, P'],
    blocks that attention reads; dropped: int64 [R], tokens left out by the window."""

    key: bytes
    whole: torch.Tensor
    read: torch.Tensor
    dropped: NDArray[np.int64]


class PassInputs(NamedTuple):
    """Inputs of a pass over R requests. inputs: int64 [2, R], tokens and positions; slots: int64 [R], KV slots to
    write; lengths: int32 [R], tokens that attention reads, on the host and on the device; position: in the drafts."""

    tables: BlockTables
    inputs: torch.Tensor
    slots: torch.Tensor
    lengths: NDArray[np.int32]
    lengths_on_device: torch.Tensor
    position: int


class Forward:
    """Base of draft passes, their CUDA graphs and scores of sets. Raises UnsupportedModel: the KV cache is of several
    kinds."""

    def __init__(self, runner: Any, backbone: Backbone, vllm_config: Any) -> None:
        from vllm.distributed import get_tp_group
        from vllm.forward_context import create_forward_context

        groups = [group for groups in runner.attn_groups for group in groups]
        if len(runner.kv_cache_config.kv_cache_groups) != 1 or len(groups) != 1:
            raise UnsupportedModel("layer skipping needs one KV cache group and one kind of attention in all layers")
        self.runner, self.backbone, self.vllm_config = runner, backbone, vllm_config
        self.group = groups[0]
        # The model's own sliding window, the same in all layers.
        self.attended: int | None = getattr(backbone.layers[0].self_attn.attn, "sliding_window", None)
        self.device = runner.device
        self.context = create_forward_context(None, vllm_config)
        self.starts_cpu = torch.arange(runner.max_num_reqs + 1, dtype=torch.int32)
        self.starts = self.starts_cpu.to(self.device)
        self.ranks = DraftRanks(get_tp_group())
        self.not_prefilling = torch.zeros(runner.max_num_reqs, dtype=torch.bool)

    def tensor(self, values: NDArray[Any]) -> torch.Tensor:
        return on_device(values, self.device)

    def run(
        self,
        module: Any,
        inputs: Any,
        *,
        positions: torch.Tensor,
        slots: torch.Tensor,
        lengths: NDArray[np.int32],
        pages: torch.Tensor,
        starts: tuple[torch.Tensor, torch.Tensor] | None = None,
        draft_index: int = 0,
        lengths_on_device: torch.Tensor | None = None,
        graph_size: int | None = None,
    ) -> Any:
        """`module(inputs, positions)` in a forward context of n requests with the same number of query tokens.

        Args:
            positions: int64 [tokens], of the query tokens.
            slots: int64 [tokens], KV slots to write.
            lengths: int32 [n], tokens that each request's last query token reads, itself included.
            pages: int32 [n, P], block tables.
            starts: int32 [n + 1], offsets of each request's query tokens, on the device and on the host; None for one
                token of each.
            graph_size: n, for `module` to capture a CUDA graph, or to replay it; None for neither.
        """
        from vllm.v1.attention.backend import CommonAttentionMetadata

        n, tokens = len(lengths), len(positions)
        lengths_cpu = torch.from_numpy(lengths)
        starts = starts or (self.starts[: n + 1], self.starts_cpu[: n + 1])
        common = CommonAttentionMetadata(
            query_start_loc=starts[0],
            query_start_loc_cpu=starts[1],
            seq_lens=lengths_cpu.to(self.device) if lengths_on_device is None else lengths_on_device,
            num_reqs=n,
            num_actual_tokens=tokens,
            max_query_len=tokens // n,
            max_seq_len=int(lengths.max()),
            block_table_tensor=pages,
            slot_mapping=slots,
            causal=True,
            positions=positions,
            is_prefilling=self.not_prefilling[:n],
            seq_lens_cpu_upper_bound=lengths_cpu,
        )
        metadata = self.group.build_metadata_for_drafting(common_attn_metadata=common, draft_index=draft_index)
        self.context.attn_metadata = dict.fromkeys(self.group.layer_names, metadata)
        self.context.slot_mapping = dict.fromkeys(self.group.layer_names, slots)
        return self.call(module, inputs, positions, graph_size)

    def call(self, module: Any, inputs: Any, positions: torch.Tensor, graph_size: int | None) -> Any:
        """`module(inputs, positions)` in the context of the last `run`; graph_size as there."""
        from vllm.config import CUDAGraphMode
        from vllm.forward_context import BatchDescriptor, override_forward_context

        context, size = self.context, graph_size
        context.cudagraph_runtime_mode = CUDAGraphMode.NONE if size is None else CUDAGraphMode.FULL
        context.batch_descriptor = None if size is None else BatchDescriptor(size, num_reqs=size, uniform=True)
        with override_forward_context(context):
            return module(inputs, positions)

    # See `Target`.

    def parts(self) -> tuple[Any, Any, Any, Any]:
        backbone = self.backbone
        return backbone.embedding, backbone.layers, backbone.norm, backbone.logits

    def prompt_lengths(self, step: Step) -> NDArray[Any]:
        return step.engine.prompt_lengths()

    def locate(self, step: Step, row: int) -> tuple[Any, int]:
        pages = step.engine.pages()
        return pages.table[int(pages.rows[row])], int(step.contexts[row]) - 1

    @torch.inference_mode()
    def read_again(self, place: Any, tokens: NDArray[np.int64], first: int, sets: int, work: Callable[..., T]) -> T:
        """In one prompt-like pass, of which each set is a request."""
        n = len(tokens)
        starts = torch.arange(0, sets * n + 1, n, dtype=torch.int32)
        return self.run(
            work,
            self.tensor(np.tile(tokens, sets)),
            positions=self.tensor(np.tile(np.arange(first, first + n), sets)),
            slots=torch.full((sets * n,), NO_SLOT, dtype=torch.int64, device=self.device),
            lengths=np.full(sets, first + n, np.int32),
            starts=(starts.to(self.device), starts),
            pages=place.expand(sets, -1).contiguous(),
        )
