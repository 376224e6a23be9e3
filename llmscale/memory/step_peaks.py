"""What is alive at each moment of a step: states and activations followed through the same passes. No torch.

The closed form of the states says what DeepSpeed holds once so many parameters have gradients, that of the activations
what autograd holds in each block; a peak is where their sum is largest, which is seldom where either of them is. Sums
are compared as plain numbers, and only the largest is broken down.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from llmscale.architecture.layers import Architecture
from llmscale.memory.activations.activation_memory import ActivationMemory
from llmscale.memory.activations.recorded import Moment
from llmscale.memory.breakdown import Breakdown
from llmscale.memory.states.state_memory import StateMemory

#: The phases of a step, with their moments in the order of time.
PHASES: dict[str, tuple[str, ...]] = {
    "forward": ("forward", "loss forward"),
    "backward": ("loss backward", "block backward", "end of backward"),
    "step": ("optimizer step",),
}


def find_moments(model: Architecture, states: StateMemory, activations: ActivationMemory) -> dict[str, Breakdown]:
    """Each part of a step by its name, at its fullest."""
    course = _Course(model, states)
    extras = {
        "forward": _blocks_forward(states, activations),
        "loss forward": _loss_forward(states, activations),
        "loss backward": _loss_backward(course, activations),
        "block backward": _blocks_backward(model, course, activations),
        "end of backward": _end_of_backward(model, course, activations),
        "optimizer step": states.step,
    }
    return {name: states.resident + extra for name, extra in extras.items()}


class _Course:
    """The states in the backward pass, by the number of parameters that have gradients."""

    def __init__(self, model: Architecture, states: StateMemory) -> None:
        self._course, self._done = states.backward_course, states.parameters_done
        self._totals, self._rests = states.backward_bytes, states.backward_rest_bytes
        self.head_gradients = model.head_gradients
        self.table_gradients = model.token_embedding.elements if model.is_tied else 0
        """Of the head's, those that exist from the loss on."""
        self._block_parameters = model.block_parameters

    def place(self, done: int) -> int:
        """The first stretch that begins with as many gradients, or the last with fewer."""
        place = bisect_left(self._done, done)
        return place if place < len(self._done) and self._done[place] == done else max(0, place - 1)

    def place_of_handover(self, done: int) -> int:
        """The stretch that begins with the gradients that have just been handed over: of a layer's, autocast hands
        over the weight's before the bias's."""
        return min(bisect_left(self._done, done), self.last_place)

    def before_block(self, blocks_done: int) -> int:
        """Parameters that have gradients after the head, the final norm and so many blocks."""
        return self.head_gradients + blocks_done * self._block_parameters

    def fullest(self, before: int, last: int) -> int:
        """The stretch with most behind `before` up to `last`, handovers left out."""
        return max(range(min(before + 1, last), last + 1), key=self._rests.__getitem__)

    def extra(self, place: int) -> Breakdown:
        return self._course[place].extra

    def rest(self, place: int) -> Breakdown:
        """Once the gradients were handed over."""
        return self._course[place].rest

    def extra_bytes(self, place: int) -> int:
        return self._totals[place]

    def rest_bytes(self, place: int) -> int:
        return self._rests[place]

    @property
    def last_place(self) -> int:
        return len(self._course) - 1


def _blocks_forward(states: StateMemory, activations: ActivationMemory) -> Breakdown:
    """The block at whose fullest moment most is live: with ZeRO-3 not always the last."""
    blocks = range(activations.n_layer)
    before = [activations.before_block_bytes(block, forward=True) for block in blocks]
    extras = [extra.total_bytes for extra in states.forward_course[1:-2]]
    block = max(blocks, key=lambda block: extras[block] + before[block])
    casts = (block + 1) * activations.forward_casts_per_block_bytes
    held = before[block] + activations.block_forward_peak_bytes
    return states.forward_course[1 + block] + Breakdown(parameters_bytes=casts, activations_bytes=held - casts)


def _loss_forward(states: StateMemory, activations: ActivationMemory) -> Breakdown:
    """Final norm, output head and loss: the fuller of what it gathers and what it computes."""
    block_casts = activations.n_layer * activations.forward_casts_per_block_bytes
    before = activations.before_block_bytes(activations.n_layer, forward=True)
    norm, head_cast = activations.saved_final_norm_bytes, activations.head_cast_bytes
    held = Breakdown(parameters_bytes=block_casts, activations_bytes=before - block_casts + norm)
    logits = Breakdown(
        parameters_bytes=head_cast, logits_bytes=activations.logits_forward_peak_bytes - norm - head_cast
    )
    moments = states.forward_course[-2] + held, states.forward_course[-1] + held + logits
    return max(moments, key=lambda extra: extra.total_bytes)


def _loss_backward(course: _Course, activations: ActivationMemory) -> Breakdown:
    """From the loss to the final norm. Among its activations' gradients is the token table's, which the states count
    too."""
    casts = activations.n_layer * activations.saved_casts_per_block_bytes
    before = Breakdown(
        parameters_bytes=casts, activations_bytes=activations.before_block_bytes(activations.n_layer) - casts
    )
    found = []
    for moment in activations.head_backward:
        place = course.place(course.table_gradients + moment.gradient_parameters) if moment.gradient_parameters else 0
        found.append(_in_head(course.rest(place), moment, activations))
    for moment in activations.head_handovers:
        place = course.place_of_handover(course.table_gradients + moment.gradient_parameters)
        found.append(_in_head(course.extra(place), moment, activations))
    return before + max(found, key=lambda extra: extra.total_bytes)


def _in_head(states: Breakdown, moment: Moment, activations: ActivationMemory) -> Breakdown:
    """Of the head's backward pass, without what the blocks have saved."""
    table = min(activations.head_gradient_bytes, states.gradients_bytes)
    norm = min(activations.saved_final_norm_bytes, moment.activations_bytes)
    return states + Breakdown(
        parameters_bytes=moment.casts_bytes,
        gradients_bytes=-table,
        activations_bytes=norm,
        logits_bytes=moment.activations_bytes - norm + moment.temporaries_bytes,
    )


def _blocks_backward(model: Architecture, course: _Course, activations: ActivationMemory) -> Breakdown:
    """From the last block to the first, whose activations go while gradients come. What DeepSpeed does with gradients
    meets what is alive when they are handed over. Between two other moments that matter no more is held than at the
    later one, so that one stands for the states of all that lies between."""
    best_bytes, best = -1, _InBlock(Breakdown(), 0, activations.block_backward[0])
    before_place = course.place(course.head_gradients) - 1
    for block in reversed(range(model.n_layer)):
        before, done = activations.before_block_bytes(block), course.before_block(model.n_layer - 1 - block)
        for moment in activations.block_backward:
            last_place = course.place(done + moment.gradient_parameters)
            place = course.fullest(before_place, last_place)
            before_place = last_place
            total = course.rest_bytes(place) + before + moment.total_bytes
            if total > best_bytes:
                best_bytes, best = total, _InBlock(course.rest(place), block, moment)
        for moment in activations.block_handovers:
            place = course.place_of_handover(done + moment.gradient_parameters)
            total = course.extra_bytes(place) + before + moment.total_bytes
            if total > best_bytes:
                best_bytes, best = total, _InBlock(course.extra(place), block, moment)
    casts = best.block * activations.saved_casts_per_block_bytes
    before = activations.before_block_bytes(best.block)
    return best.states + Breakdown(
        parameters_bytes=casts + best.moment.casts_bytes,
        activations_bytes=before - casts + best.moment.activations_bytes,
        temporaries_bytes=best.moment.temporaries_bytes,
    )


@dataclass(frozen=True)
class _InBlock:
    """A moment of one block's backward pass."""

    states: Breakdown
    block: int
    moment: Moment


def _end_of_backward(model: Architecture, course: _Course, activations: ActivationMemory) -> Breakdown:
    """The embeddings' gradients, and what DeepSpeed does at the end. The table's gradient from the head is in both
    closed forms, the one from the look-up in the activations' until it is complete."""
    found = [course.extra(course.last_place) + Breakdown(activations_bytes=activations.saved_embedding_bytes)]
    # With both gradients of the table it is as above.
    before = course.before_block(model.n_layer)
    moments = [
        (moment, course.rest(course.place(before + moment.gradient_parameters)))
        for moment in activations.embedding_backward
        if before + moment.gradient_parameters < model.num_parameters
    ]
    for moment in activations.embedding_handovers:
        place = course.place_of_handover(before + moment.gradient_parameters)
        moments += [(moment, course.extra(place))] if place != course.last_place else []
    for moment, states in moments:
        table = min(activations.head_gradient_bytes, states.gradients_bytes, moment.temporaries_bytes)
        found.append(
            states
            + Breakdown(
                gradients_bytes=-table,
                activations_bytes=moment.activations_bytes,
                temporaries_bytes=moment.temporaries_bytes,
            )
        )
    return max(found, key=lambda extra: extra.total_bytes)
