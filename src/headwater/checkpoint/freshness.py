"""Whether a checkpoint is newer than another, judged from which of its chunks repeat.

The evidence is the optimizer. Adam's moments (Kingma and Ba, 2015) are m <- b1 m + (1 - b1) g and
v <- b2 v + (1 - b2) g^2: in fp32 each normal number decays at every step, so a chunk of them that repeats although its
parameter's step advanced, or a run of elements that does, was not written from the live tensor. In lower precision a
single small chunk may round to itself, so those are judged by the whole tensor; so are master weights. Model weights in
bf16 often repeat in a healthy run: only all of them together are evidence.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from headwater.checkpoint.foreign.record import Contents, StoredChunk

_MOMENTS = ("exp_avg", "exp_avg_sq")
_EXACT = ("F32", "F64")
_NAMED = 3

Outcome = Literal["fresh", "stale", "cannot tell"]
Advance = Literal["yes", "no", "back", "assumed"]


@dataclass(frozen=True)
class Pair:
    """The same box of the same tensor in both folders."""

    old: StoredChunk
    new: StoredChunk


@dataclass(frozen=True)
class Repeat:
    """What of a pair repeats.

    repeated: all bytes equal. live: the bytes hold a number that a step of Adam would change; known if repeated.
    in_part: not all bytes are equal, but those of a run of elements are that a step would have changed; looked for in
    what `in_part_counts` names.
    """

    repeated: bool
    live: bool
    in_part: bool = False


@dataclass(frozen=True)
class StaleChunk:
    """A chunk that should have changed; role as in StoredChunk, or "step"."""

    component: str
    role: str
    key: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class ComponentReport:
    """One model and its optimizer (a policy, a value model); the name is empty where a folder holds only one.

    compared, repeated: chunks. old_steps, new_steps: the lowest and the highest, None where none is stored.
    idle: parameters that were not trained between the two. frozen: repeated weights without optimizer state.
    """

    component: str
    state: Literal["advanced", "idle", "stale"]
    old_steps: tuple[float, float] | None
    new_steps: tuple[float, float] | None
    compared: int
    repeated: int
    idle: tuple[str, ...]
    frozen: tuple[str, ...]


@dataclass(frozen=True)
class Verdict:
    """The answer, with its reasons, one line each."""

    outcome: Outcome
    reasons: tuple[str, ...]
    components: tuple[ComponentReport, ...] = ()
    stale: tuple[StaleChunk, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        return {"fresh": 0, "stale": 1, "cannot tell": 2}[self.outcome]


def in_part_counts(chunk: StoredChunk) -> bool:
    """Whether a part of a chunk that repeats is evidence."""
    return chunk.role in _MOMENTS and chunk.dtype in _EXACT


def pair_up(old: Contents, new: Contents) -> list[Pair]:
    """The chunks that are evidence and are in both folders, in the order of `new`."""
    before = {chunk.place: chunk for chunk in old.chunks}
    return [Pair(before[chunk.place], chunk) for chunk in new.chunks if chunk.role != "other" and chunk.place in before]


def judge(old: Contents, new: Contents, repeats: Mapping[tuple[object, ...], Repeat]) -> Verdict:
    """Whether `new` is newer. repeats: for the place of each pair of `pair_up`.

    Stale: a repeated chunk that its step says must have changed, steps that go back, or no component that advanced.
    Cannot tell: nothing in common, or evidence of `old` that `new` lacks. Never raises.
    """
    notes = (*old.notes, *new.notes)
    if old.identity and new.identity and old.identity != new.identity:
        reason = f"the folders belong to different models: {old.identity} and {new.identity}"
        return Verdict("cannot tell", (reason,), notes=notes)
    chunks = [chunk for chunk in new.chunks if chunk.place in repeats]
    if not chunks:
        reason = f"the folders have no tensor in common that tells anything ({old.kind}, {new.kind})"
        return Verdict("cannot tell", (reason,), notes=notes)
    has_optimizer = any(chunk.role in (*_MOMENTS, "param") for chunk in (*old.chunks, *new.chunks))
    by_component: dict[str, list[StoredChunk]] = defaultdict(list)
    for chunk in chunks:
        by_component[chunk.component].append(chunk)
    judged = [
        _Component(name, members, old, new, repeats, has_optimizer) for name, members in sorted(by_component.items())
    ]
    return _verdict(judged, _missing(old, new), notes)


def _missing(old: Contents, new: Contents) -> list[StoredChunk]:
    """Evidence that cannot be compared: other names, other boxes (another parallel layout), another dtype, or lost."""
    places = {chunk.place for chunk in new.chunks}
    return [chunk for chunk in old.chunks if chunk.role != "other" and chunk.place not in places]


def _verdict(judged: list[_Component], missing: list[StoredChunk], notes: tuple[str, ...]) -> Verdict:
    stale = [chunk for component in judged for chunk in component.stale]
    reasons = _stale_reasons(stale)
    outcome: Outcome = "fresh"
    if reasons:
        outcome = "stale"
    elif missing:
        outcome = "cannot tell"
        reasons = [
            f"{len(missing)} chunks of OLD have no counterpart of the same name, box and dtype in NEW "
            f"({_some(sorted({chunk.key for chunk in missing}))}): lost, or saved under another layout or model"
        ]
    elif not any(component.advanced for component in judged):
        outcome = "stale"
        stale = [chunk for component in judged for chunk in component.all_repeated()]
        reasons = ["nothing advanced: no step went up and no tensor changed", *_stale_reasons(stale)]
    return Verdict(outcome, tuple(reasons), tuple(c.report(stale) for c in judged), tuple(stale), notes)


def _stale_reasons(stale: Iterable[StaleChunk]) -> list[str]:
    grouped: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for chunk in stale:
        grouped[chunk.component, chunk.role, chunk.reason].append(f"{chunk.key} {_where(chunk.offset)}".rstrip())
    return [
        f"{_named(component)}{role} {reason} ({len(keys)} chunk{'s' if len(keys) > 1 else ''}): {_some(keys)}"
        for (component, role, reason), keys in grouped.items()
    ]


def _where(offset: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, offset))}]" if any(offset) else ""


def _some(names: list[str]) -> str:
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")


class _Component:
    """The rules, applied to the chunks of one component that both folders have."""

    def __init__(
        self,
        name: str,
        chunks: list[StoredChunk],
        old: Contents,
        new: Contents,
        repeats: Mapping[tuple[object, ...], Repeat],
        has_optimizer: bool,
    ) -> None:
        self.name = name
        self.stale: list[StaleChunk] = []
        self.idle: list[str] = []
        self._old, self._new, self._repeats = old, new, repeats
        self._chunks = chunks
        self._weights = [chunk for chunk in chunks if chunk.role == "weight"]
        self._state: dict[str, list[StoredChunk]] = defaultdict(list)
        for chunk in chunks:
            if chunk.role != "weight":
                self._state[chunk.parameter].append(chunk)
        # Buckets do not say which parameters are in them, so that nothing is known to have no state.
        self._named_state = any(weight.parameter in self._state for weight in self._weights)
        self.advanced = any(not self._repeated(chunk) for chunk in chunks)
        self._with_moments = {c.parameter for c in new.chunks if c.component == name and c.role in _MOMENTS}
        self._has_moments = any(c.role in _MOMENTS for c in new.chunks)
        self._some_moment_changed = any(c.role in _MOMENTS and not self._repeated(c) for c in chunks)
        trained = not has_optimizer
        for parameter, state in self._state.items():
            trained = self._judge_parameter(parameter, state) or trained
        if trained and self._weights and all(map(self._repeated, self._weights)):
            self._mark(self._weights, "repeated: not one weight of the model changed")

    def _judge_parameter(self, parameter: str, state: list[StoredChunk]) -> bool:
        """Judge moments and master copy of one parameter; whether it was trained between the two folders."""
        moments = [chunk for chunk in state if chunk.role in _MOMENTS]
        masters = [chunk for chunk in state if chunk.role == "param"]
        advance, why = self._advance(parameter)
        if advance == "back":
            self._mark_step(parameter, f"{why}; are the folders swapped?")
            return False
        if advance == "no":
            return self._judge_still(parameter, moments, masters)
        self.advanced = self.advanced or advance == "yes"
        for chunk in filter(in_part_counts, moments):
            if self._must_move(chunk):
                self._mark([chunk], f"repeated although {why}")
            elif self._repeats[chunk.place].in_part:
                self._mark([chunk], f"repeated in part although {why}")
        for tensor in _tensors(chunk for chunk in moments if not in_part_counts(chunk)):
            if all(map(self._repeated, tensor)) and any(map(self._must_move, tensor)):
                self._mark(tensor, f"repeated as a whole although {why}")
        if not self._touched(parameter, moments):
            self.idle.append(parameter)
            return advance == "yes"
        self.idle += [f"{parameter} {_where(offset)}".rstrip() for offset in self._untouched_boxes(moments)]
        for tensor in _tensors(masters):
            if all(map(self._repeated, tensor)):
                self._mark(tensor, f"repeated as a whole although {why}")
        return True

    def _touched(self, parameter: str, moments: list[StoredChunk]) -> bool:
        """Whether a gradient ever met a parameter: torch makes its moments at the first one, Megatron makes zeros."""
        if moments:
            return any(not self._repeated(chunk) or self._must_move(chunk) for chunk in moments)
        # A policy in critic warm-up has no moments at all, while the value model beside it has.
        return parameter in self._with_moments or not self._has_moments

    def _untouched_boxes(self, moments: list[StoredChunk]) -> list[tuple[int, ...]]:
        """Where in a parameter no gradient ever was. Megatron keeps all experts, of all layers, as one parameter."""
        untouched: dict[tuple[int, ...], bool] = {}
        for chunk in moments:
            still = self._repeated(chunk) and not self._must_move(chunk)
            untouched[chunk.offset] = untouched.get(chunk.offset, True) and still
        return sorted(offset for offset, still in untouched.items() if still)

    def _judge_still(self, parameter: str, moments: list[StoredChunk], masters: list[StoredChunk]) -> bool:
        """A parameter whose step repeats: idle, unless something else of it moved."""
        if any(not self._repeated(chunk) for chunk in moments):
            self._mark_step(parameter, "repeated although the moments changed")
            return True
        weights = [chunk for chunk in self._weights if chunk.parameter == parameter]
        frozen_in_time = [chunk for chunk in moments if self._must_move(chunk)]
        if frozen_in_time and any(not self._repeated(chunk) for chunk in (*weights, *masters)):
            self._mark(frozen_in_time, "repeated, like the step, although the parameter itself changed")
            return True
        self.idle.append(parameter)
        return False

    def _advance(self, parameter: str) -> tuple[Advance, str]:
        """Whether a parameter's step went up, and how to say so."""
        key = (self.name, parameter)
        if key in self._old.steps and key in self._new.steps:
            before, after = (self._old.steps[key],), (self._new.steps[key],)
            whose = "its step"
        else:
            before, after = self._old.group_steps.get(self.name, ()), self._new.group_steps.get(self.name, ())
            whose = "the step of its group"
        if not before or not after:
            return "assumed", "an advance is assumed (no step is stored)"
        if before == after:
            if key not in self._new.steps and self._some_moment_changed:
                return "assumed", "other moments changed (the stored step of the group repeats too)"
            return "no", ""
        if max(after) < max(before):
            return "back", f"goes back from {_range(before)} to {_range(after)}"
        if len(before) == len(after) and all(a < b for a, b in zip(before, after, strict=True)):
            return "yes", f"{whose} went from {_range(before)} to {_range(after)}"
        return "assumed", "an advance is assumed (only some groups' steps went up)"

    def _repeated(self, chunk: StoredChunk) -> bool:
        return self._repeats[chunk.place].repeated

    def _must_move(self, chunk: StoredChunk) -> bool:
        """Whether a chunk repeats that any step would have changed."""
        found = self._repeats[chunk.place]
        return found.repeated and found.live

    def _is_frozen(self, weight: StoredChunk) -> bool:
        return self._named_state and weight.parameter not in self._state and self._repeated(weight)

    def _mark(self, chunks: Iterable[StoredChunk], reason: str) -> None:
        self.stale += [self._stale(chunk, reason) for chunk in chunks]

    def _mark_step(self, parameter: str, reason: str) -> None:
        self.stale.append(StaleChunk(self.name, "step", f"step of {parameter}", (), (), reason))

    def _stale(self, chunk: StoredChunk, reason: str) -> StaleChunk:
        return StaleChunk(self.name, chunk.role, chunk.key, chunk.offset, chunk.shape, reason)

    def all_repeated(self) -> list[StaleChunk]:
        """Every repeated chunk that is not all zeros."""
        return [self._stale(chunk, "repeated") for chunk in self._chunks if self._must_move(chunk)]

    def report(self, stale: Iterable[StaleChunk]) -> ComponentReport:
        """What to show of this component. stale: of all components."""
        is_stale = any(chunk.component == self.name for chunk in stale)
        return ComponentReport(
            component=self.name,
            state="stale" if is_stale else "advanced" if self.advanced else "idle",
            old_steps=_steps(self._old, self.name),
            new_steps=_steps(self._new, self.name),
            compared=len(self._chunks),
            repeated=sum(map(self._repeated, self._chunks)),
            idle=tuple(self.idle),
            frozen=tuple(dict.fromkeys(weight.key for weight in self._weights if self._is_frozen(weight))),
        )


def _tensors(chunks: Iterable[StoredChunk]) -> list[list[StoredChunk]]:
    whole: dict[str, list[StoredChunk]] = defaultdict(list)
    for chunk in chunks:
        whole[chunk.key].append(chunk)
    return list(whole.values())


def _steps(contents: Contents, component: str) -> tuple[float, float] | None:
    found = [step for (owner, _), step in contents.steps.items() if owner == component]
    found += contents.group_steps.get(component, ())
    return (min(found), max(found)) if found else None


def _range(steps: tuple[float, ...]) -> str:
    low, high = min(steps), max(steps)
    return f"{low:g}" if low == high else f"{low:g}..{high:g}"


def _named(component: str) -> str:
    return f"{component}: " if component else ""
