"""Adapters for the order of a batch and its parts, and for KV groups; see `adapters`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import attrs
import numpy as np

from fstep.ops import order

Given = Mapping[str, Any]


# The order of a batch -----------------------------------------------------------------------------------------------


def reorder_decode_first(given: Given) -> dict[str, Any]:
    """Ours is the stable order; the one with the fewest swaps is as right."""
    names = ("num_scheduled_tokens", "num_computed_tokens", "num_prompt_tokens", "decode_threshold")
    region = order.regions(*(given[name] for name in names))
    places = order.decode_first(region).tolist()
    return {
        "region_of_request": region.tolist(),
        "region_counts": np.bincount(region, minlength=len(order.Region)).tolist(),
        "order_stable": places,
        "changed": places != sorted(places),
    }


def split_decodes_prefills(given: Given) -> dict[str, Any]:
    split = order.split_decodes_prefills(**given)
    assert split.num_extends == split.num_extend_tokens == 0
    return {name: value for name, value in attrs.asdict(split).items() if "extend" not in name}


def split_decodes_extends_prefills(given: Given) -> dict[str, Any]:
    return attrs.asdict(order.split_decodes_extends_prefills(**given))


def token_reorder_decode_first(given: Given) -> dict[str, Any]:
    tokens, num_decode_tokens = order.decode_tokens_first(**given)
    return {"token_order": tokens.tolist(), "num_decode_tokens": num_decode_tokens}


def query_start_loc_slice(given: Given) -> dict[str, Any]:
    return {"query_start_loc": order.query_start_loc_of(**given).tolist()}


def ubatch_slices(given: Given) -> dict[str, Any]:
    padded, reqs_padded = given["num_tokens_padded"], given["num_reqs_padded"]
    names = ("num_scheduled_tokens", "num_tokens_padded", "num_ubatches", "split_point")
    slices = order.ubatch_slices(*(given[name] for name in names))
    return {
        "slices": list(map(_ubatch, slices)),
        "slices_padded": list(map(_ubatch, order.padded_ubatches(slices, padded, reqs_padded))),
    }


def _ubatch(ubatch: order.Ubatch) -> dict[str, list[int]]:
    return {"requests": list(ubatch.requests), "tokens": list(ubatch.tokens)}


def ubatch_last_empty(given: Given) -> dict[str, Any]:
    return {"last_empty": order.ubatch_last_empty(**given)}


def expand_to_tokens(given: Given) -> dict[str, Any]:
    return {"per_token": order.expand_to_tokens(**given).tolist()}


def attention_state(given: Given) -> dict[str, Any]:
    return {"state": order.attention_state(**given).value}


GROUP_ADAPTERS: Mapping[str, Callable[[Given], dict[str, Any]]] = MappingProxyType(
    {
        "attention_state": attention_state,
        "expand_to_tokens": expand_to_tokens,
        "query_start_loc_slice": query_start_loc_slice,
        "reorder_decode_first": reorder_decode_first,
        "split_decodes_extends_prefills": split_decodes_extends_prefills,
        "split_decodes_prefills": split_decodes_prefills,
        "token_reorder_decode_first": token_reorder_decode_first,
        "ubatch_last_empty": ubatch_last_empty,
        "ubatch_slices": ubatch_slices,
    }
)
