"""The test kit: models whose tokens tell whether a batch was right, an oracle, checks of the invariants, whole runs.

- `HashModel`, `RollingModel`: language models that live in the paged cache.
- `reference_tokens`: what a request gives alone, without batch or cache.
- `check_…`, `poison`, `guarded`: the invariants, on plain arrays, on states, around functions.
- `Runner`, `StepReport`: the protocol of what the kit can drive; `StepRunner` is fstep's own step as one, `HashCache` a
  model for an engine that has none.
- `INVARIANTS`: what is promised, and which check holds each promise.
- `play`, `checked_step`, `adversarial_schedule`: scripts run against a scheduler, every check on.
- `fstep.testing.strategies`: Hypothesis strategies for the scripts; imported by name, since it needs `hypothesis`.

Imports without torch.
"""

from fstep.ops.checks import (
    arrays_of,
    check_batch,
    check_conservation,
    check_held,
    check_limits,
    check_logits_indices,
    check_query_start_loc,
    check_rows,
    check_rows_stay,
    check_seq_lens,
    check_slots,
    check_state,
    check_tables,
    pools_of,
)
from fstep.state import BatchArrays, CheckError, PoolView
from fstep.testing.adversary import Choose, Scheduler, adversarial_schedule, adversary
from fstep.testing.checked import Checked
from fstep.testing.checks import check_same, guarded, poison, snapshot, still_cached
from fstep.testing.code import as_code
from fstep.testing.drive import (
    Answer,
    Moment,
    Played,
    check_against_reference,
    checked_step,
    play,
    what_happened,
)
from fstep.testing.events import EVENTS, Event, Seen, events_in
from fstep.testing.hash_models import HashModel, RollingModel
from fstep.testing.invariants import (
    INVARIANTS,
    Invariant,
    check_forks,
    check_hit,
    check_isolated,
    check_padding,
    check_permuted,
    check_persistent,
    check_preempted,
    check_repeated,
    check_replays,
    check_split,
    replay,
    tokens_to_the_end,
)
from fstep.testing.lives import Life, LifePhase, Turn, check_answer
from fstep.testing.reference import reference_token, reference_tokens
from fstep.testing.runner import HashCache, KnowsAnswers, Output, Runner, StepOutput, StepReport, StepRunner, report_of

__all__ = [
    "EVENTS",
    "INVARIANTS",
    "Answer",
    "BatchArrays",
    "CheckError",
    "Checked",
    "Choose",
    "Event",
    "HashCache",
    "HashModel",
    "Invariant",
    "KnowsAnswers",
    "Life",
    "LifePhase",
    "Moment",
    "Output",
    "Played",
    "PoolView",
    "RollingModel",
    "Runner",
    "Scheduler",
    "Seen",
    "StepOutput",
    "StepReport",
    "StepRunner",
    "Turn",
    "adversarial_schedule",
    "adversary",
    "arrays_of",
    "as_code",
    "check_against_reference",
    "check_answer",
    "check_batch",
    "check_conservation",
    "check_forks",
    "check_held",
    "check_hit",
    "check_isolated",
    "check_limits",
    "check_logits_indices",
    "check_padding",
    "check_permuted",
    "check_persistent",
    "check_preempted",
    "check_query_start_loc",
    "check_repeated",
    "check_replays",
    "check_rows",
    "check_rows_stay",
    "check_same",
    "check_seq_lens",
    "check_slots",
    "check_split",
    "check_state",
    "check_tables",
    "checked_step",
    "events_in",
    "guarded",
    "play",
    "poison",
    "pools_of",
    "reference_token",
    "reference_tokens",
    "replay",
    "report_of",
    "snapshot",
    "still_cached",
    "tokens_to_the_end",
    "what_happened",
]
