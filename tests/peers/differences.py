"""Where we answer otherwise than a peer, on purpose, and which rules have no code yet.

`docs/differences.md` gives the reason for each id in `DIFFERENCES`; a test compares the two lists.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate
from types import MappingProxyType
from typing import Any

#: What we answer instead, field by field, for each vector of our own folder.
DIFFERENCES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "incremental_detokenize-02": {"text": "\ufffd"},
        "pad_tail-03": {"query_start_loc": [0], "seq_lens": [], "slot_mapping": []},
        "stop_string_stream-01": {"chunks": ["ab", "c", "", ""]},
        "stop_string_stream-04": {"chunks": ["a", ""]},
        "stop_string_stream-05": {"chunks": ["x", ""]},
    }
)


def shows_no_later(ours: Any, theirs: Any, given: Any) -> bool:  # noqa: ARG001
    """After each delta at least what the peer shows is out, and the whole text is the same."""
    shown, shown_there = list(accumulate(ours["chunks"])), list(accumulate(theirs["chunks"]))
    early = all(mine.startswith(peer) for mine, peer in zip(shown, shown_there, strict=False))
    return early and ours["text"] == theirs["text"] == "".join(ours["chunks"])


def ends_with_a_replacement(ours: Any, theirs: Any, given: Any) -> bool:
    """The bytes end inside a character, and the final text says so with one U+FFFD."""
    whole = b"".join(bytes.fromhex(each) for each in given["token_bytes_hex"])
    return ours["text"] == theirs["text"] + "\ufffd" == whole.decode(errors="replace")


def empty_and_unpadded(ours: Any, theirs: Any, given: Any) -> bool:  # noqa: ARG001
    """A step without requests keeps its own shape."""
    return not given["seq_lens"] and ours == {"query_start_loc": [0], "seq_lens": [], "slot_mapping": []}


#: What may differ in any vector of a rule, those of a foreign folder too.
ALLOWED: Mapping[tuple[str, str], Callable[[Any, Any, Any], bool]] = MappingProxyType(
    {
        ("stop_string_stream", "chunks"): shows_no_later,
        ("pad_tail", "query_start_loc"): empty_and_unpadded,
        ("pad_tail", "seq_lens"): empty_and_unpadded,
        ("pad_tail", "slot_mapping"): empty_and_unpadded,
        ("incremental_detokenize", "text"): ends_with_a_replacement,
    }
)

#: Fields of `expected` that name another right answer beside the one that we give.
ALTERNATIVES: Mapping[str, frozenset[str]] = MappingProxyType({"reorder_decode_first": frozenset({"order_min_swap"})})

#: Features that aren't built, and the rules that wait for each.
_WAITING: Mapping[str, str] = MappingProxyType(
    {
        "a prefix cache by tokens instead of whole blocks": "radix_match",
        "a cache of encoder outputs": "encoder_cache_trace",
        "LoRA": "lora_mapping",
        "overlap": "seq_lens_correction",
        "captured graphs": "graph_dispatch capture_length_list",
        "data parallelism": "dp_agreement",
        "expert parallelism": "eplb_balanced_packing eplb_replicate",
        "log-probabilities": "logprobs_topk prompt_logprobs_rows",
        "the rest of the sampling parameters": "allowed_token_ids bad_words bad_words_with_drafts logit_bias "
        "min_tokens penalties no_repeat_ngram",
        "the rest of the stop rules": "repetition_stop stop_sequence_tokens",
        "structured output": "grammar_bitmask",
        "a thinking budget": "thinking_budget_step thinking_budget_trace",
        "speculation": "coupled_verify drafter_inputs_padded drafter_inputs_unpadded drafter_next_tokens "
        "drafter_shift logits_indices_spec ngram_propose parse_rejection_output rejection_greedy rejection_random "
        "spec_metrics suffix_propose",
    }
)

#: Rules without code here, and the feature that each waits for.
WAITING: Mapping[str, str] = MappingProxyType(
    {rule: what for what, rules in _WAITING.items() for rule in rules.split()}
)
