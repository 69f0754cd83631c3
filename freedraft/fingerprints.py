"""Identities that files are checked against: a tokenizer's vocabulary, the hardware of measurements."""

import hashlib
import os
import platform
from pathlib import Path
from typing import Any


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """SHA-256, in hex, over the sorted (token, id) pairs of `tokenizer.get_vocab()`, added tokens included."""
    digest = hashlib.sha256()
    for token, token_id in sorted(tokenizer.get_vocab().items()):
        data = token.encode("utf-8", "surrogatepass")
        digest.update(b"%d:%b:%d;" % (len(data), data, token_id))
    return digest.hexdigest()


def hardware_name(device: str = "cpu") -> str:
    """The name of the processor of `device` ("cpu", "cuda", "cuda:1")."""
    if device.startswith("cuda"):
        import torch

        return str(torch.cuda.get_device_name(device))
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        models = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line]
        name = models[0] if models else name
    return f"{name}, {os.cpu_count()} CPUs"
