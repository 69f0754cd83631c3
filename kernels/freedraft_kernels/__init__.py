"""Device code of tree speculation: inputs of the target model, verification, and KV compaction.

Every operation has a torch reference, which is its specification, and a Triton kernel with bit-identical results
(attention and log-probabilities: within rounding). Triton kernels run on CUDA tensors (and anywhere under
`TRITON_INTERPRET=1`), references elsewhere. No operation synchronises host and device. Nothing here imports an engine;
Triton is imported on first use.
"""

from freedraft_kernels.inputs import TreeInputs, tree_inputs
from freedraft_kernels.kv_pool import KVPool
from freedraft_kernels.newest_tokens import newest_tokens
from freedraft_kernels.top_tokens import top_tokens
from freedraft_kernels.tree import TreeBatch
from freedraft_kernels.tree_attention import TreeQueries, scratch_size, tree_attention
from freedraft_kernels.tree_pages import PagedKeys, write_tree_pages
from freedraft_kernels.tree_queries import NodeMasks, write_tree_queries
from freedraft_kernels.verification import Verification, verify, verify_rows
from freedraft_kernels.warm_up import warm_up

__all__ = [
    "KVPool",
    "NodeMasks",
    "PagedKeys",
    "TreeBatch",
    "TreeInputs",
    "TreeQueries",
    "Verification",
    "newest_tokens",
    "scratch_size",
    "top_tokens",
    "tree_attention",
    "tree_inputs",
    "verify",
    "verify_rows",
    "warm_up",
    "write_tree_pages",
    "write_tree_queries",
]
