"""As `serve.py`, for models with latent attention, which here decodes drafts as that of devices does."""

import dataclasses

import torch
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl

from tests.vllm.v2_interpreted import serve


class Builder(MLACommonMetadataBuilder[MLACommonMetadata]):
    query_len_support = QueryLenSupport.UNIFORM


def decode_drafts():
    """Token by token, each with the text before it, as TRITON_MLA does."""
    decode_one = CPUMLAImpl.forward_mqa

    def forward_mqa(self, q, cache, metadata, layer):
        decode = metadata.decode
        tokens = len(q[0] if isinstance(q, tuple) else q) // len(decode.seq_lens)
        lengths = (decode.seq_lens[:, None] + torch.arange(1 - tokens, 1)).flatten().clamp(min=1)
        pages = decode.block_table.repeat_interleave(tokens, 0)
        each = dataclasses.replace(decode, block_table=pages, seq_lens=lengths)
        return decode_one(self, q, cache, dataclasses.replace(metadata, decode=each), layer)

    CPUMLAImpl.forward_mqa = forward_mqa
    CPUMLABackend.get_builder_cls = staticmethod(lambda: Builder)


if __name__ == "__main__":
    decode_drafts()
    serve.main()
