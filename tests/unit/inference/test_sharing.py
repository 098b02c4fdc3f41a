"""vLLM's scheduler with the share of chats, in virtual time: a step takes some time for itself and for each token."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from manual_clock import ManualClock
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine.core import DPEngineCoreProc, EngineCoreProc
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

import inference.coalescing
import inference.sharing
from inference.chat_share import BURST_S, SHARE, EngineReport, report_in
from inference.coalescing import END_S, CoalescingAsyncScheduler, CoalescingScheduler
from inference.marks import CHAT
from inference.sharing import LONGEST_REST_S
from trireme.core.engine_use import Purpose

MODEL = "./assets/sort-base"
PLACES, BLOCK, BLOCKS = 32, 16, 800
CHATS = 3
"""So many chats have places in the engine: the service lets in no more than its share of them."""
STEP_S, TOKEN_S = 0.004, 0.0005
ANSWER = 20
A_TENTH = 0.1


@pytest.fixture(scope="module")
def vllm_config() -> VllmConfig:
    arguments = AsyncEngineArgs(
        model=MODEL,
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=256,
        max_num_seqs=PLACES,
        scheduling_policy="priority",
        disable_log_stats=True,
        kv_cache_memory_bytes=2**26,
        enforce_eager=True,
        enable_prefix_caching=False,
    )
    made = arguments.create_engine_config()
    made.cache_config.num_gpu_blocks = BLOCKS
    return made


class VirtualInbox(queue.Queue[Any]):
    """A queue of requests in which nothing comes."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__()
        self.not_empty = cast(Any, self)
        self.clock = clock

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def wait(self, seconds: float) -> None:
        self.clock.now += seconds


class Engine:
    """An engine without a model: each step of its scheduler takes its time, and samples a token for each request."""

    def __init__(self, scheduler: CoalescingScheduler, clock: ManualClock) -> None:
        self.scheduler, self.clock = scheduler, clock
        self.ended: Counter[str] = Counter()
        """Requests that have ended, by the first word of their names."""
        self.ends: list[Callable[[str], None]] = []
        self.report = EngineReport({}, 0)
        self.sampled: Counter[str] = Counter()
        """Tokens by request."""
        self._numbers = itertools.count()

    def ask(self, who: str, purpose: Purpose, tokens: int = ANSWER, cpu_s: float = 0.0, prompt: int = 8) -> str:
        name = f"{who}-{next(self._numbers)}"
        params = SamplingParams(
            max_tokens=tokens,
            output_kind=RequestOutputKind.FINAL_ONLY,
            ignore_eos=True,
            extra_args={CHAT: cpu_s} if purpose == "chat" else None,
        )
        self.scheduler.add_request(
            Request(request_id=name, prompt_token_ids=[1] * prompt, sampling_params=params, pooling_params=None)
        )
        return name

    def step(self) -> set[str]:
        """Makes a step; returns the requests that were in it."""
        planned = self.scheduler.schedule()
        names = list(planned.num_scheduled_tokens)
        tokens = planned.total_num_scheduled_tokens
        self.clock.now += STEP_S + TOKEN_S * tokens if tokens else 0.001  # vLLM sleeps so long after an empty step
        requests = [self.scheduler.requests[name] for name in names]
        whole = [r.num_computed_tokens >= r.num_tokens for r in requests]
        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=cast(Any, [[7] if each else [] for each in whole]),
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )
        for message in self.scheduler.update_from_output(planned, output).values():
            if message.scheduler_stats:
                self.report = report_in(message.scheduler_stats) or self.report
            for each in message.outputs:
                self.sampled[each.request_id] += len(each.new_token_ids)
                if each.finished:
                    who = each.request_id.partition("-")[0]
                    self.ended[who] += 1
                    for end in self.ends:
                        end(who)
        return set(names)

    def rest(self) -> None:
        """Rests as the loop of the engine does before it looks for requests."""
        self.scheduler.rest(VirtualInbox(self.clock))

    def run(self, seconds: float) -> None:
        """Makes steps for some time."""
        until = self.clock.now + seconds
        while self.clock.now < until:
            if self.scheduler.has_requests():
                self.rest()
                self.step()
            else:
                self.clock.now += 0.001

    def seconds(self, purpose: Purpose) -> float:
        return self.report.uses[purpose].seconds


@pytest.fixture
def make_engine(vllm_config: VllmConfig, clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Engine]:
    for module in (inference.coalescing, inference.sharing):
        monkeypatch.setattr(module, "time", clock)

    def make(share: float, kind: type[CoalescingScheduler] = CoalescingScheduler) -> Engine:
        monkeypatch.setenv(SHARE, str(share))
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
        cache = KVCacheConfig(
            num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
        )
        grammar = StructuredOutputManager(vllm_config)
        made = kind(vllm_config, cache, grammar, block_size=BLOCK, log_stats=True)
        return Engine(made, clock)

    return make


def keep_asking(engine: Engine, who: str, purpose: Purpose, clients: int, **more: Any) -> None:
    """Lets so many clients ask, and ask again whenever an answer has ended."""
    engine.ends.append(lambda ended: (ended == who and engine.ask(who, purpose, **more)) and None)
    for _ in range(clients):
        engine.ask(who, purpose, **more)


def check_bounded(engine: Engine, seconds: float, share: float = A_TENTH) -> None:
    """Checks that chats had all of their share, as they always asked for more, and no more."""
    longest = STEP_S + TOKEN_S * 8 * PLACES
    assert share * seconds - BURST_S <= engine.seconds("chat") <= share * seconds + BURST_S + longest


@pytest.mark.parametrize("kind", [CoalescingScheduler, CoalescingAsyncScheduler])
def test_chats_have_their_share_of_a_full_engine_and_no_more(
    make_engine: Callable[..., Engine], kind: type[CoalescingScheduler]
) -> None:
    """Their prompts are long, so that they would have much more in their few places."""
    parts = []
    for share in (A_TENTH, 1.0):
        engine = make_engine(share, kind)
        keep_asking(engine, "run", "run", 2 * PLACES)
        keep_asking(engine, "chat", "chat", CHATS, prompt=200)
        engine.run(20.0)
        assert engine.seconds("run") + engine.seconds("chat") == pytest.approx(20.0, rel=0.03), "it is always busy"
        parts.append(engine.seconds("chat") / 20)
        if share == A_TENTH:
            check_bounded(engine, 20.0)
            assert engine.ended["chat"] > CHATS
    assert parts[1] > 2 * A_TENTH, "else there was nothing to bound"


def test_chats_have_their_share_of_a_mostly_idle_engine_and_no_more(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(A_TENTH)
    keep_asking(engine, "chat", "chat", CHATS)
    for _ in range(20):  # a little of the run at the beginning of each second
        engine.ask("run", "run")
        engine.run(1.0)
    check_bounded(engine, 20.0)
    assert engine.ended["run"] == 20


@pytest.mark.parametrize("busy", [False, True])
def test_long_answers_have_no_more_than_short_ones(make_engine: Callable[..., Engine], busy: bool) -> None:
    """All that clients may ask for is in the engine at once, and none of it ends."""
    engine = make_engine(A_TENTH)
    for _ in range(CHATS):
        engine.ask("chat", "chat", tokens=200)
    if busy:
        keep_asking(engine, "run", "run", PLACES)
    engine.run(4.0)
    check_bounded(engine, 4.0)
    assert not engine.ended["chat"]


def test_chats_are_not_starved_by_requests_of_the_run_that_never_end(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(A_TENTH)
    engine.scheduler._share.charge(BURST_S + 0.1)  # what others had before
    name = engine.ask("chat", "chat")
    keep_asking(engine, "run", "run", PLACES - 1)
    engine.run(1.0)
    assert not engine.sampled[name], "it takes a second until there is anything"
    engine.run(2.0)
    assert engine.ended["chat"] == 1


def test_chats_that_wait_go_on_together(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(A_TENTH)
    chats = {engine.ask("chat", "chat", tokens=100) for _ in range(5)}
    for _ in range(9):
        engine.ask("run", "run", tokens=200)
    with_chats = [names & chats for names in (engine.step() for _ in range(150))]
    assert set(map(frozenset, with_chats)) == {frozenset(), frozenset(chats)}


def test_the_run_is_as_fast_as_alone_while_chats_wait(make_engine: Callable[..., Engine]) -> None:
    taken = []
    for clients in (0, CHATS):
        engine = make_engine(0.001)
        for _ in range(clients):
            engine.ask("chat", "chat")
        engine.scheduler._share.charge(100.0)
        began = engine.clock.now
        for _ in range(PLACES - CHATS):
            engine.ask("run", "run")
        while engine.ended["run"] < PLACES - CHATS:
            engine.step()
        taken.append(engine.clock.now - began)
    assert taken[1] == pytest.approx(taken[0], rel=0.05)


def test_what_a_chat_has_cost_elsewhere_is_taken_from_its_share(make_engine: Callable[..., Engine]) -> None:
    ended = []
    for cpu_s in (0.0, 0.02):
        engine = make_engine(A_TENTH)
        keep_asking(engine, "chat", "chat", CHATS, cpu_s=cpu_s)
        engine.run(20.0)
        ended.append(engine.ended["chat"])
        all_s = engine.seconds("chat") + cpu_s * (ended[-1] + CHATS)
        assert all_s == pytest.approx(A_TENTH * 20 + BURST_S, rel=0.05)
    assert ended[1] < ended[0]


@pytest.mark.parametrize("share", [A_TENTH, 1.0])
def test_a_share_of_all_bounds_nothing(make_engine: Callable[..., Engine], share: float) -> None:
    engine = make_engine(share)
    keep_asking(engine, "chat", "chat", CHATS)
    engine.run(10.0)
    assert (engine.seconds("chat") > 9.9) == (share == 1.0)


def test_an_engine_of_waiting_chats_rests_until_they_may_be_in_a_step(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(A_TENTH)
    engine.scheduler._share.charge(BURST_S + 0.03)
    name = engine.ask("chat", "chat")
    assert engine.scheduler.rest_s() == pytest.approx(0.3)
    engine.clock.now += 0.3 + 1e-6
    assert engine.scheduler.rest_s() == 0
    assert engine.step() == {name}
    engine.scheduler._share.charge(10.0)
    assert engine.scheduler.rest_s() == LONGEST_REST_S
    engine.ask("chat", "chat")
    engine.clock.now += LONGEST_REST_S
    engine.step()
    assert engine.report.chats_waiting == 1, "the other has a place"
    engine.ask("run", "run")
    assert engine.scheduler.rest_s() == 0


def test_an_engine_does_not_rest_before_it_has_sent_what_it_keeps(make_engine: Callable[..., Engine]) -> None:
    """The end of a request of the run waits for others for a moment, and not for as long as chats must wait."""
    engine = make_engine(A_TENTH)
    engine.scheduler._share.charge(10.0)
    engine.ask("chat", "chat")
    engine.ask("run", "run")
    while len(engine.scheduler.requests) == 2:
        assert engine.scheduler.rest_s() == 0
        engine.step()
    assert engine.scheduler.rest_s() == 0, "the worker is to forget the request"
    engine.step()
    assert not engine.ended["run"]
    assert 0 < engine.scheduler.rest_s() < END_S
    engine.rest()
    engine.step()
    assert engine.ended["run"] == 1
    assert engine.scheduler.rest_s() == LONGEST_REST_S


def test_time_of_rest_is_of_none(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(A_TENTH)
    engine.ask("chat", "chat")
    engine.step()
    before = engine.scheduler._clock.uses["chat"].seconds
    engine.scheduler._share.charge(10.0)
    for _ in range(250):
        engine.rest()
    assert engine.clock.now > 100.0
    engine.step()
    assert engine.scheduler._clock.uses["chat"].seconds - before == pytest.approx(STEP_S + TOKEN_S)


def engine_core(kind: type[EngineCoreProc], scheduler: CoalescingScheduler) -> EngineCoreProc:
    """Returns vLLM's engine with what its loop needs before a step."""
    core = object.__new__(kind)
    core.scheduler, core.batch_queue, core.engines_running = scheduler, deque(), False
    core.input_queue = queue.Queue()
    return core


class TestTheLoopOfTheEngine:
    @pytest.fixture
    def core(self, make_engine: Callable[..., Engine]) -> EngineCoreProc:
        engine = make_engine(A_TENTH)
        engine.scheduler._share.charge(10.0)
        engine.ask("chat", "chat")
        return engine_core(EngineCoreProc, engine.scheduler)

    def test_it_rests_and_is_woken_by_a_request(self, core: EngineCoreProc, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(inference.sharing, "LONGEST_REST_S", 30.0)
        got: list[Any] = []
        monkeypatch.setattr(EngineCoreProc, "_handle_client_request", lambda core, *request: got.append(request))
        waker = threading.Timer(0.2, core.input_queue.put, [("add", "a request")])
        began = time.monotonic()
        waker.start()
        core._process_input_queue()
        waker.join()
        assert got == [("add", "a request")]
        assert 0.2 <= time.monotonic() - began < 15.0

    def test_it_makes_a_step_now_and_then(self, core: EngineCoreProc) -> None:
        began = time.monotonic()
        core._process_input_queue()
        assert time.monotonic() - began >= LONGEST_REST_S

    def test_vllm_itself_still_makes_steps_without_a_rest(
        self, core: EngineCoreProc, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Fails when vLLM waits where each request waits: then `inference.sharing.rest_before_requests` can go."""

        def get(*_: object, **__: object) -> None:
            raise AssertionError("vLLM's loop waits for a request")

        monkeypatch.setattr(core.input_queue, "get", get)
        cast(Any, EngineCoreProc._process_input_queue).__wrapped__(core)

    @pytest.mark.parametrize("why", ["a step is in flight", "others wait for its steps"])
    def test_it_does_not_rest_while(self, core: EngineCoreProc, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
        def rest(*_: object) -> None:
            raise AssertionError("it rests")

        monkeypatch.setattr(core.scheduler, "rest", rest)
        with pytest.raises(AssertionError, match="it rests"):
            core._process_input_queue()
        if why == "a step is in flight":
            cast(deque[Any], core.batch_queue).append(None)
        else:
            core = engine_core(DPEngineCoreProc, cast(CoalescingScheduler, core.scheduler))
        core._process_input_queue()


def test_chats_that_are_aborted_while_they_wait_are_forgotten(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(A_TENTH)
    running = engine.ask("chat", "chat")
    engine.step()
    engine.scheduler._share.charge(10.0)
    waiting = engine.ask("chat", "chat")
    engine.step()
    engine.scheduler.finish_requests([running, waiting], RequestStatus.FINISHED_ABORTED)
    engine.step()
    assert not engine.scheduler.has_requests()
    engine.ask("run", "run")
    engine.step()
    assert not engine.scheduler._chats


def test_a_pause_is_time_of_none(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(A_TENTH)
    engine.ask("run", "run", tokens=100)
    engine.run(0.1)
    before = engine.scheduler._clock.uses["run"].seconds
    engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    engine.clock.now += 100.0
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.step()
    assert engine.scheduler._clock.uses["run"].seconds - before == pytest.approx(STEP_S + TOKEN_S)


def test_chats_keep_what_they_have_over_a_pause_that_drops_the_cache(make_engine: Callable[..., Engine]) -> None:
    """As an update of the weights does, while they wait."""
    engine = make_engine(A_TENTH)
    name = engine.ask("chat", "chat")
    for _ in range(3):
        engine.step()
    engine.scheduler._share.charge(1.0)
    engine.step()
    engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.run(0.5)
    assert engine.scheduler.requests[name].num_output_tokens == 3
    assert not engine.report.preemptions
    engine.run(20.0)
    assert (engine.ended["chat"], engine.sampled[name]) == (1, ANSWER)


def test_a_chat_is_preempted_as_any_request(make_engine: Callable[..., Engine]) -> None:
    """The run needs the space that waiting chats have."""
    engine = make_engine(A_TENTH)
    for _ in range(4):
        engine.ask("run", "run", tokens=100)
    engine.step()
    chats = [engine.ask("chat", "chat", prompt=200) for _ in range(CHATS)]
    engine.step()
    assert set(chats) <= {request.request_id for request in engine.scheduler.running}
    engine.scheduler._share.charge(3.0)
    pool = engine.scheduler.kv_cache_manager.block_pool
    pool.get_new_blocks(pool.get_num_free_blocks())  # all that is free
    steps = 0
    while len(engine.scheduler.requests) > len(chats):
        assert engine.step(), "the run has its steps"
        steps += 1
    assert steps > 80
    assert engine.scheduler._chats_wait
    assert not engine.report.preemptions, "the run has all of its places"
    assert any(request.num_preemptions for request in engine.scheduler.requests.values())


def test_preemptions_of_the_run_for_lack_of_space_are_counted_and_those_of_an_update_are_not(
    make_engine: Callable[..., Engine],
) -> None:
    """The run has as many sequences as fit, of which an update drops the cache twice; then space becomes short."""
    engine = make_engine(A_TENTH)
    for _ in range(PLACES):
        engine.ask("run", "run", tokens=200)
    for _ in range(2):
        engine.step()
        engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.run(0.5)
    assert not engine.report.preemptions
    pool = engine.scheduler.kv_cache_manager.block_pool
    pool.get_new_blocks(pool.get_num_free_blocks())
    engine.run(0.5)
    assert 0 < engine.report.preemptions < PLACES
