"""SkipSet: an immutable value that knows which model it is for."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerskip_plugin.skip_set import SkipSet, model_fingerprint

SMOL = {"model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
SMOL |= {"num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152}


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=40))
def test_bits_and_sublayers_give_the_set_back(pairs: list[tuple[bool, bool]]) -> None:
    bits = [flag for pair in pairs for flag in pair]
    skip = SkipSet.of_sublayers((i for i, flag in enumerate(bits) if flag), len(pairs), "m")
    assert list(skip.bits) == bits
    assert skip.attention == {i for i, (a, _) in enumerate(pairs) if a}
    assert skip.mlp == {i for i, (_, m) in enumerate(pairs) if m}
    assert len(skip) == sum(bits) and bool(skip) == any(bits)
    assert SkipSet.of_sublayers(skip.sublayers, skip.n_layers, "m") == skip
    assert hash(SkipSet.from_dict(json.loads(json.dumps(skip.to_dict())))) == hash(skip)


def test_fingerprint_knows_the_shape_and_not_the_name() -> None:
    ours = model_fingerprint(SMOL)
    assert ours == model_fingerprint(SMOL | {"_name_or_path": "x", "dtype": "float32", "head_dim": 64})
    assert ours == model_fingerprint(SimpleNamespace(**SMOL))
    assert ours != model_fingerprint(SMOL | {"num_hidden_layers": 31})
    with pytest.raises(ValueError, match="hidden_size"):
        model_fingerprint({k: v for k, v in SMOL.items() if k != "hidden_size"})
