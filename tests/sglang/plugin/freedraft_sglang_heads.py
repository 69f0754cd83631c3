"""What SGLang's EAGLE needs on a CPU without AMX: attention of the head, slots and chains without kernels of GPUs."""


def take_heads():
    import torch
    from sglang.srt.arg_groups import speculative_hook
    from sglang.srt.managers import overlap_utils
    from sglang.srt.speculative import draft_utils, eagle_utils, eagle_worker_common

    from freedraft.engines.sglang_cpu.attention import TreeAttentionBackend
    from freedraft.engines.sglang_cpu.platform import CpuTreePlatform, verify_cache_locs

    class Steps:
        """Attention of K - 1 passes, each over one more token than the one before. SGLang gives all of them the batch
        of the first."""

        def __init__(self, runner, steps):
            self.attn_backends = [Step(runner, i + 1) for i in range(steps - 1)]
            self.needs_cpu_seq_lens = True

        def init_forward_metadata(self, batch):
            pass

    class Step(TreeAttentionBackend):
        def __init__(self, runner, more):
            super().__init__(runner)
            self.more = more

        def forward_decode(self, q, k, v, layer, batch, save_kv_cache=True, **_):
            cached = (batch.seq_lens + self.more - 1).tolist()
            return self._attend(q, (k, v), layer, batch, cached, [1] * len(cached), None)

    def put_slots(rows, req_to_token, starts, out, topk, columns, positions=None, mrope=None):
        assert topk == 1
        out[:] = verify_cache_locs(
            req_pool_indices=rows, req_to_token=req_to_token, start_offset=starts, end_offset=None, device=rows.device,
            batch_size=len(rows), draft_token_num=columns,
        )  # fmt: skip

    def link(parents, scores, lengths, mask, positions, index, child, sibling, topk, steps, nodes, mode):
        assert topk == 1 and nodes == steps + 1
        positions[:] = (lengths[:, None] + torch.arange(nodes)).flatten()
        index[:] = torch.arange(index.numel()).view(index.shape)
        child[:, :-1] = torch.arange(1, nodes)
        seen = [torch.ones(nodes, nodes + length, dtype=torch.bool).tril(length) for length in lengths.tolist()]
        torch.cat([each.flatten() for each in seen], out=mask)

    def gather(rows, *buffers):
        return tuple(buffer if buffer is None else buffer[rows] for buffer in buffers)

    factory = draft_utils.DraftBackendFactory
    factory.create_decode_backend = lambda self: Steps(self.draft_model_runner, self.speculative_num_steps)
    factory.create_draft_extend_backend = lambda self: TreeAttentionBackend(self.draft_model_runner)
    eagle_worker_common.assign_draft_cache_locs_contiguous_func = put_slots
    eagle_utils.build_tree_kernel_efficient_func = link
    take_greedy_verification()
    overlap_utils.gather_spec_extras = gather
    speculative_hook._disable_overlap_schedule_for_cpu = lambda _: None
    CpuTreePlatform.supports_speculative_algorithm = lambda self, algorithm: True


def take_greedy_verification():
    """SGLang's own, for a head alone."""
    import torch
    from sglang.srt.speculative import eagle_utils, eagle_worker_common

    def verify(predicts, accept_index, accept_token_num, candidates, target_predict, **_):
        right = (candidates[:, 1:] == target_predict[:, :-1]).long().cumprod(1).sum(1)
        nodes = torch.arange(candidates.shape[1])
        index = torch.arange(candidates.numel()).view(candidates.shape)
        predicts[:], accept_token_num[:] = target_predict.flatten(), right
        accept_index[:] = torch.where(nodes <= right[:, None], index, -1)
        return predicts, accept_index, accept_token_num

    def fill(tokens, lengths, out, stride, size):
        out[:] = tokens.view(size, stride).gather(1, lengths[:, None].long() - 1).flatten()

    eagle_utils.verify_tree_greedy_func = verify
    eagle_worker_common.fill_bonus_tokens_func = fill
