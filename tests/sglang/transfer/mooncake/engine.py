"""In place of Mooncake's transfer engine, where it is not installed: writes to the memory of another process of this
machine, whose number stands for its port."""

import ctypes
import os

ANYONE, SET_TRACER = ctypes.c_ulong(-1), 0x59616D61  # prctl: who may write to this process


class Part(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class TransferEngine:
    def initialize(self, *_):
        self._c = ctypes.CDLL(None, use_errno=True)
        self._c.prctl(SET_TRACER, ANYONE, 0, 0, 0)  # fails where nobody needs leave
        return 0

    def get_rpc_port(self):
        return os.getpid()

    def register_memory(self, *_):
        return 0

    unregister_memory = batch_register_memory = batch_unregister_memory = register_memory

    def transfer_sync_write(self, session, source, target, length):
        process = int(session.rpartition(":")[2])
        mine, theirs = Part(source, length), Part(target, length)
        written = self._c.process_vm_writev(process, ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0)
        return 0 if written == length else -1

    def batch_transfer_sync_write(self, session, sources, targets, lengths):
        parts = zip(sources, targets, lengths, strict=True)
        return min((self.transfer_sync_write(session, *part) for part in parts), default=0)
