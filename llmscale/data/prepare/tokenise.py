"""A source's documents to the windows of their splits; what is done is kept now and then."""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from llmscale.data.prepare import window_shuffle
from llmscale.data.prepare.batches import Batch, Mark, gather
from llmscale.data.prepare.encode_threads import work_in_order
from llmscale.data.prepare.encoder import Encoder, EncoderName, choose_encoder
from llmscale.data.prepare.quarantine import Quarantine
from llmscale.data.prepare.resume_state import ResumeState, save_resume_state
from llmscale.data.prepare.sources.source import Source, TokenRules
from llmscale.data.prepare.split_writer import SplitWriter
from llmscale.data.prepare.tokenise_batch import BatchTokeniser, TokenisedBatch
from llmscale.data.prepare.tokenised_document import TokenisedDocument
from llmscale.data.prepare.train_val_split import SplitAssigner, ValidationKeeper, split_scores
from llmscale.data.prepare.work_folder import WorkFolder
from llmscale.data.shards.manifest import TokenDtype
from llmscale.data.tokenizers.tokenizer import Tokenizer
from llmscale.terminal.progress import Progress

#: What an interrupted run loses at most, where documents need not wait for a validation split.
CHECKPOINT_INTERVAL_S = 30.0


class Distributor:
    """Sends documents to the writers of their splits, and keeps what is done."""

    def __init__(
        self,
        writers: Mapping[str, SplitWriter],
        work: WorkFolder,
        quarantine: Quarantine,
        *,
        val_fraction: float,
        window: int,
        seed: int,
        state: ResumeState | None,
        is_always_kept: bool = False,
    ) -> None:
        """`window` is the tokens of one. `state` is what an interrupted run has left. `is_always_kept`: what is done
        in the end is written down even if it did not take long."""
        self._writers = writers
        self._work = work
        self._quarantine = quarantine
        self._seed = seed
        self._assigner = SplitAssigner[TokenisedDocument](val_fraction)
        self._keeper = ValidationKeeper[TokenisedDocument](val_fraction, window)
        self.mark = Mark()
        if state is not None:
            self._assigner.go_on(state.held)
            self._keeper.is_settled = True
            self.mark = state.mark
        self._has_runs = is_always_kept or state is not None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="write")
        self._under_way: tuple[Future[None], ResumeState] | None = None
        self._kept_s = time.monotonic()

    @property
    def note(self) -> str:
        """How the validation split was made, where it is not whole documents."""
        return self._keeper.note

    def add(self, batch: TokenisedBatch) -> None:
        """Raises OSError, DataError for too many rejected records."""
        scores = split_scores(batch.text_hashes, self._seed)
        number = 0
        while number < len(scores) and not self._is_settled:
            for split, assigned in self._assigner.assign(float(scores[number]), batch.document(number)):
                self._pass_on(split, assigned)
            number += 1
        self._pass_on_at_once(batch, scores, number)
        self.mark = batch.mark
        self._quarantine.add(batch.rejected)
        self._keep_now_and_then()

    def _pass_on_at_once(self, batch: TokenisedBatch, scores: NDArray[np.float64], first: int) -> None:
        """The documents from `first` on, neighbours that go to one split together."""
        if first == len(scores):
            return
        is_val = self._assigner.is_val(scores)
        changes = np.flatnonzero(is_val[first + 1 :] != is_val[first:-1]) + first + 1
        for begin, end in pairwise([first, *changes.tolist(), len(scores)]):
            self._writers["val" if is_val[begin] else "train"].add_documents(
                batch.tokens_of(begin, end), end - begin, sum(batch.num_text_bytes[begin:end])
            )

    @property
    def _is_settled(self) -> bool:
        """Whether a document's score alone says where it goes."""
        return self._assigner.is_settled and self._keeper.is_settled

    def finish(self) -> None:
        """No document is left. Raises OSError."""
        for split, assigned in self._assigner.finish():
            self._pass_on(split, assigned)
        for split, document in self._keeper.finish():
            self._writers[split].add_documents(document.tokens, 1, document.num_text_bytes)
        if self._has_runs:
            self._keep(is_read=True)
            self._wait()

    def close(self) -> None:
        """Let go of the thread that writes."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _pass_on(self, split: str, document: TokenisedDocument) -> None:
        for where, kept in self._keeper.add(split, document):
            self._writers[where].add_documents(kept.tokens, 1, kept.num_text_bytes)

    def _keep_now_and_then(self) -> None:
        if self._under_way is not None and self._under_way[0].done():
            self._wait()
        is_full = sum(w.waiting_bytes for w in self._writers.values()) >= window_shuffle.BUFFER_BYTES
        is_time = time.monotonic() - self._kept_s >= CHECKPOINT_INTERVAL_S and self._under_way is None
        if self._keeper.is_settled and (is_full or is_time):
            self._keep(is_read=False)

    def _keep(self, *, is_read: bool) -> None:
        """Begin to write the windows in memory, and with them the state of this moment."""
        self._wait()
        self._has_runs, self._kept_s = True, time.monotonic()
        taken = {name: writer.take_run() for name, writer in self._writers.items()}
        state = ResumeState(
            self.mark,
            (self._quarantine.size_bytes, self._quarantine.num_records),
            {name: split for name, (_, split) in taken.items()},
            None if self._assigner.is_settled or is_read else self._assigner.held(),
            self.note,
            is_read,
        )

        def write() -> None:
            for name, (run, _) in taken.items():
                self._writers[name].write_run(run)

        self._under_way = self._pool.submit(write), state

    def _wait(self) -> None:
        """For what is being written; then that is what a killed run goes on from."""
        if self._under_way is not None:
            (done, state), self._under_way = self._under_way, None
            done.result()
            save_resume_state(self._work, state)


def tokenise(
    source: Source,
    tokenizer: Tokenizer,
    distributor: Distributor,
    progress: Progress,
    *,
    dtype: TokenDtype,
    encoder: EncoderName,
    num_workers: int,
) -> None:
    """Every document of a source that is not in its split yet. Raises DataError, OSError."""
    rules = TokenRules(tokenizer.vocab_size, tokenizer.eot_token, tokenizer.bos_tokens)
    batches = gather(source, rules, distributor.mark)
    first = next(batches, None)
    if first is None:
        return
    num_text_bytes = num_tokens = 0
    work = BatchTokeniser(tokenizer, _choose(tokenizer, encoder, first, progress), dtype)
    all_batches = _chain(first, batches)
    with closing(work_in_order(all_batches, work, num_workers, weigh=lambda batch: batch.weight)) as tokenised:
        for batch in tokenised:
            distributor.add(batch)
            num_text_bytes += sum(batch.num_text_bytes)
            num_tokens += len(batch.tokens)
            progress.show(
                num_text_bytes, batch.mark.read_bytes, source.total_bytes, f"{num_tokens / 1e6:,.1f} M tokens"
            )


def _chain(first: Batch, rest: Generator[Batch]) -> Generator[Batch]:
    """Closes what it takes the rest from, wherever it is closed itself."""
    with closing(rest):
        yield first
        yield from rest


def _choose(tokenizer: Tokenizer, wanted: EncoderName, first: Batch, progress: Progress) -> Encoder:
    texts = [document for document in first.documents if isinstance(document, str)]
    encoder, why_slow = choose_encoder(tokenizer, wanted, texts)
    if why_slow:
        progress.say(why_slow)
    return encoder
