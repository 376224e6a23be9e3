"""train.py with a fault planted: `fault_job.py FAULT train.py's flags`. FAULT is

noise:STEP              the samples of that step are noise, whenever they are drawn
nan:STEP:RANK:TIMES     on a rank, the last module of block 1's MLP puts out infinity in so many steps from that one
stuck                   no step ever ends
crash:STEPS             every rank fails after so many steps of a start, once its checkpoint is written
fp16                    none, on a CPU that is taken to have fp16's arithmetic
huge-gradients:STEP     from that step on gradients are finite, and their norm is not
slow-first-line         SIGTERM arrives after the first step, while its line takes longer to end than a start-up to stop
slow-data:RANK          a rank waits 50 ms for every micro-batch
slow-forward:RANK       a rank takes 50 ms longer for every forward pass; slow-head:RANK, for that of its head
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable

import torch

RANK = os.environ.get("RANK", "0")
SLEEP_S = 0.05


def noise(step: str) -> None:
    from llmscale.training.session import Session

    fetch, noisy = Session.fetch, set()

    def fetch_noise(session: Session, number: int) -> list:
        batches = fetch(session, number)
        if number + 1 == int(step) and not noisy:
            noisy.update(torch.cat([batch.sample_ids for batch in batches]).tolist())
        draw = torch.Generator().manual_seed(0)
        for batch in batches:
            if noisy & set(batch.sample_ids.tolist()):
                batch.tokens.copy_(torch.randint(0, 250, batch.tokens.shape, generator=draw))
        return batches

    Session.fetch = fetch_noise  # type: ignore[method-assign]


def nan(step: str, rank: str, times: str) -> None:
    from llmscale.training.session import Session

    train = Session.train

    def train_with_infinity(session: Session, number: int, batches: list):  # type: ignore[no-untyped-def]
        handle = None
        if rank == RANK and int(step) <= number + 1 < int(step) + int(times):
            last = list(session.engine.deepspeed.module.blocks[1].mlp.modules())[-1]
            # Before whoever looks at what comes out.
            handle = last.register_forward_hook(lambda _module, _inputs, output: output * float("inf"), prepend=True)
        done = train(session, number, batches)
        if handle:
            handle.remove()
        return done

    Session.train = train_with_infinity  # type: ignore[method-assign]


def stuck() -> None:
    from llmscale.training.session import Session

    def train(*_: object) -> None:
        print("the first step is stuck", flush=True)
        time.sleep(3600)

    Session.train = train  # type: ignore[method-assign,assignment]


def crash(steps: str) -> None:
    from llmscale.training.session import Session

    decide = Session.decide

    def decide_or_crash(session: Session, step: int):  # type: ignore[no-untyped-def]
        if step - session.run.first_step == int(steps):
            session.rollback.finish_saving()
            raise RuntimeError("planted")
        return decide(session, step)

    Session.decide = decide_or_crash  # type: ignore[method-assign]


def fp16() -> None:
    from deepspeed.accelerator import get_accelerator

    type(get_accelerator()).is_fp16_supported = lambda _: True


def huge_gradients(step: str) -> None:
    from llmscale.training.session import Session

    train = Session.train

    def train_with_factor(session: Session, number: int, batches: list):  # type: ignore[no-untyped-def]
        handles = []
        if number + 1 >= int(step):
            parameters = session.engine.deepspeed.module.parameters()
            handles = [one.register_hook(lambda gradient: gradient * 0 + 1e25) for one in parameters]
        done = train(session, number, batches)
        for handle in handles:
            handle.remove()
        return done

    Session.train = train_with_factor  # type: ignore[method-assign]


def slow_first_line() -> None:
    from llmscale.terminal.status_line import StatusLine
    from llmscale.training.stop_request import _MAIN_RANK_LATER_S, _START_GRACE_S

    end, calls = StatusLine.end, list[StatusLine]()

    def end_slowly(line: StatusLine) -> None:
        if not calls:
            calls.append(line)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(_START_GRACE_S + _MAIN_RANK_LATER_S + 1)
        end(line)

    StatusLine.end = end_slowly  # type: ignore[method-assign]


def slow(owner: type, name: str, rank: str) -> None:
    method: Callable = getattr(owner, name)

    def slower(*args: object, **kwargs: object) -> object:
        if rank == RANK:
            time.sleep(SLEEP_S)
        return method(*args, **kwargs)

    setattr(owner, name, slower)


def plant(fault: str) -> None:
    from llmscale.data.loader import Feed
    from llmscale.model.gpt import GPT, TiedHead

    kind, *values = fault.split(":")
    slowed = {"slow-data": (Feed, "__next__"), "slow-forward": (GPT, "forward"), "slow-head": (TiedHead, "forward")}
    if kind in slowed:
        slow(*slowed[kind], *values)
    else:
        globals()[kind.replace("-", "_")](*values)


if __name__ == "__main__":
    from llmscale.train import main
    from llmscale.training.stop_request import StopRequest

    stop = StopRequest()
    stop.install()
    plant(sys.argv[1])
    status = main(sys.argv[2:], stop)
    sys.stdout.flush()
    os._exit(status)
