"""How SGLang is asked by the tests of all engines."""

import asyncio
import json
from collections import Counter
from contextlib import contextmanager, suppress

from tests.support.conformance import OFF, PROMPTS, TOKENS, Served, greedy
from tests.support.models import continuations
from tests.support.waiting import wait_until

NAMES = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed"}


class OnSglang(Served):
    least_room = 7

    def __init__(self, engine, folder, model, states, overlap):
        self.engine, self.folder, self.model, self.states, self.overlap = engine, folder, model, states, overlap
        self.counts_ends = overlap  # otherwise the tokens of a step are counted at the next one
        self.manager, self.run = engine.tokenizer_manager, engine.loop.run_until_complete
        self.expected = continuations(folder, PROMPTS, TOKENS)
        self.method, self.noted, self.called = "sssd", Counter(), "asked"

    def read(self, name="counts.json"):
        path = self.folder / name
        return Counter(json.loads(path.read_text()) if path.exists() else {})  # before the first step

    def sampling(self, asked, method):
        made = {NAMES.get(name, name): value for name, value in asked.items() if name != "logprobs"}
        made["custom_params"] = {"method": method} | made.pop("extra", {})
        if (schema := made.pop("schema", None)) is not None:
            made["json_schema"] = json.dumps(schema)
        if "logit_bias" in made:
            made["logit_bias"] = {str(token): bias for token, bias in made["logit_bias"].items()}
        return made

    def outputs(self, prompts, each, *, method, salt="a", **more):
        """Of SGLang, to requests that are all there at once."""
        from sglang.srt.managers.io_struct import GenerateReqInput

        self.settle()
        self.method, sampling = method, [self.sampling(asked, method) for asked in each]
        self.noted["asked"] += 1
        names = [f"{self.called}-{self.noted['asked']}-{i}" for i in range(len(prompts))]
        request = GenerateReqInput(
            input_ids=list(prompts), sampling_params=sampling, rid=names, cache_salt=salt, **more
        )
        outputs = self.run(anext(self.manager.generate_request(request, None)))
        for meta in (output["meta_info"] for output in outputs):
            self.noted["cached"] += meta["cached_tokens"]
            self.noted["preempted"] += meta.get("num_retractions", 0)
        return outputs

    def answers(self, prompts, each, *, method, salt="a"):
        wanted = [asked.get("logprobs", 0) for asked in each]
        more = {"return_logprob": [*map(bool, wanted)], "top_logprobs_num": wanted}
        found = []
        for output in self.outputs(prompts, each, method=method, salt=salt, **more):
            meta = output["meta_info"]
            rows = [meta.get("output_token_logprobs") or (), *(meta.get("output_top_logprobs") or ())]
            found.append((output["output_ids"], [p for row in rows for p, *_ in row or ()]))
        return found

    def settle(self):
        """SGLang tells of requests that end with their prefill, or the context, when the next one comes."""
        for _ in range(3):
            with suppress(AssertionError):
                wait_until(lambda: self.read()["held"] == 0, 2)
                return
            self.one_more("last", self.method)
        raise AssertionError(f"something is left: {self.read()}")

    def one_more(self, name, method):
        self.method, sampling = method, self.sampling(greedy(3, extra=OFF), method)
        self.engine.generate(input_ids=PROMPTS[0], sampling_params=sampling, rid=f"{name}-{self.noted['more']}")
        self.noted["more"] += 1

    def abort(self, prompts, method):
        self.abort_all(prompts, method)
        wait_until(lambda: self.read()["held"] == 0)

    def abort_all(self, prompts, method, thrown_out=False):
        """thrown_out: while they wait to be prefilled again."""
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

        self.settle()
        self.method, before = method, self.read()["steps"]

        async def run():
            names = [f"abort-{i}-{self.noted['aborted']}" for i in range(len(prompts))]
            sampling = self.sampling(greedy(200), method)
            long = self.engine.async_generate(input_ids=list(prompts), sampling_params=sampling, rid=names)
            running = asyncio.create_task(long)
            await asyncio.to_thread(wait_until, lambda: self.read()["steps"] >= before + 6)
            if thrown_out:
                await self.manager.pause_generation(PauseGenerationReqInput(mode="retract"))
            for name in names:
                self.manager.abort_request(rid=name)
            if thrown_out:
                await self.manager.continue_generation(ContinueGenerationReqInput())
            await asyncio.gather(running, return_exceptions=True)

        self.run(run())
        self.noted["aborted"] += 1

    def counts(self):
        self.settle()
        self.one_more("counts", "alone")  # the tokens of a step are counted at the next one
        self.settle()
        return self.read() + self.noted

    def forget_prefixes(self):
        self.settle()
        flushed = self.run(self.manager.flush_cache(timeout_s=60))
        assert flushed.success, flushed.message

    @contextmanager
    def crowded(self):
        self.settle()
        before, thrown_out, self.called = self.read(), self.noted["preempted"], "crowded"
        yield
        self.called = "asked"
        assert self.noted["preempted"] > thrown_out, "nobody was thrown out: the test does not test that"
        done = self.read() - before
        # With overlap, drafting begins while SGLang still waits for the step before.
        assert done["prepared"] == (done["steps"] if self.overlap else 0)

    def check_nothing_is_left(self):
        self.settle()
        assert not self.read()["wrong texts"]

    @contextmanager
    def watched(self):
        """Gives what the methods that look at the KV pool around every step have noted in the meantime."""
        before, noted = self.read("watched.json"), Counter()
        yield noted
        self.settle()
        numbers = {name: value for name, value in self.read("watched.json").items() if isinstance(value, int)}
        noted.update({name: value - before[name] for name, value in numbers.items()})
        assert not noted["written elsewhere"], "a pass wrote into a slot that is not this step's"
