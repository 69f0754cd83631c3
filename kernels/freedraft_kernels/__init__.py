"""Device code of tree speculation: inputs of the target model, verification, and KV compaction.

What also runs on CPUs has a torch reference, and a Triton kernel with bit-identical results (log-probabilities: within
rounding). Triton kernels run on CUDA tensors (and anywhere under `TRITON_INTERPRET=1`), references elsewhere; what GPUs
alone run is imported from `freedraft_kernels.device`. No operation synchronises host and device. Nothing here imports
an engine; Triton is imported on first use.
"""

from freedraft_kernels.inputs import TreeInputs, tree_inputs
from freedraft_kernels.kv_pool import KVPool
from freedraft_kernels.top_tokens import top_tokens
from freedraft_kernels.tree import TreeBatch
from freedraft_kernels.verification import Verification, verify, verify_rows
from freedraft_kernels.warm_up import warm_up

__all__ = [
    "KVPool",
    "TreeBatch",
    "TreeInputs",
    "Verification",
    "top_tokens",
    "tree_inputs",
    "verify",
    "verify_rows",
    "warm_up",
]
