"""What a draft pass through a window is to say."""

import numpy as np
import torch

from freedraft.draft_model import Window


class Reference:
    """The model in transformers, over a cache that the whole model has filled, with a mask in place of pages.

    Args:
        page: tokens of a page.
    """

    def __init__(self, folder, page):
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        self.page = page

    @torch.inference_mode()
    def draft(self, tokens, window, length):
        """So many tokens drafted behind these; how close the nearest decision was."""
        root = len(tokens) - 1
        cache = self.model(torch.tensor([tokens[:-1]]), use_cache=True).past_key_values
        drafted, closest = tokens[-1:], np.inf
        for position in range(root, root + length):
            pages, newest = np.arange(position + 1) // self.page, (root + 1 - window.newest) // self.page
            seen = (pages < -(-window.sinks // self.page)) | (pages >= newest)
            mask = torch.where(torch.from_numpy(seen), 0.0, float("-inf"))[None, None, None]
            logits = self.model(
                torch.tensor([drafted[-1:]]),
                past_key_values=cache,
                attention_mask=mask,
                position_ids=torch.tensor([[position]]),
            ).logits[0, -1]
            best = logits.topk(2)
            drafted.append(int(best.indices[0]))
            closest = min(closest, float(best.values[0] - best.values[1]))
        return drafted[1:], closest

    def judge(self, rounds, window):
        """Fail where drafts (tokens, what was drafted behind them) are others, or the window hides nothing of them."""
        judged, unlike_whole = 0, 0
        for tokens, drafted in rounds:
            expected, closest = self.draft(tokens, window, len(drafted))
            if closest > 1e-4:
                judged += 1
                assert drafted == expected, len(tokens)
                unlike_whole += drafted != self.draft(tokens, Window(0, 1000), len(drafted))[0]
        assert judged > 0.8 * len(rounds) > 15
        assert unlike_whole > 3, "the window hides nothing that matters: the test does not test that"
