"""Adapters for the order of a batch and its parts, KV groups, attention and positions; see `adapters`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import attrs
import numpy as np

from fstep.ops import context_parallel, groups, order, positions, visibility
from fstep.state import ChunkedLocal, EncoderOnly, FullAttention, KVKind, SlidingWindow

Given = Mapping[str, Any]


class NotBuiltError(Exception):
    """The vector asks for something that has no code here yet; the message names it."""


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


# KV groups ----------------------------------------------------------------------------------------------------------


def kind_of(given: Given) -> KVKind:
    match given["kind"]:
        case "full":
            return FullAttention()
        case "sliding_window":
            return SlidingWindow(given["sliding_window"])
        case "chunked_local":
            return ChunkedLocal(given["attention_chunk_size"])
    raise NotBuiltError(f"KV of the kind {given['kind']}")


def kv_groups(given: Given) -> dict[str, Any]:
    """A kind is written "full", or "sw8" for a window of 8."""
    kinds = {name: _kind_named(name) for name in given["layers"]}
    names = {kind: name for name, kind in kinds.items()}
    made = groups.group_layers([kinds[name] for name in given["layers"]])
    return {"groups": [list(layers) for _, layers in made], "kinds": [names[kind] for kind, _ in made]}


def _kind_named(name: str) -> KVKind:
    if name == "full":
        return FullAttention()
    if name.startswith("sw"):
        return SlidingWindow(int(name[2:]))
    raise NotBuiltError(f"layers of the kind {name}")


def _page_bytes(given: Given) -> int:
    return groups.page_size_bytes(given["block_size"], given["num_kv_heads"], given["head_size"], given["dtype"])


def kv_unify_page_size(given: Given) -> dict[str, Any]:
    pages = [groups.Page(layer["block_size"], _page_bytes(layer)) for layer in given["layers"]]
    made = groups.unify_pages(pages)
    sizes = [page.size_bytes for page in made]
    return {"block_sizes": [page.block_size for page in made], "page_size_bytes": sizes}


def kv_page_plan(given: Given) -> dict[str, Any]:
    """What is asked for depends on what is given."""
    page = _page_bytes(given)
    made = {"page_size_bytes": page}
    if "max_model_len" in given:
        limits = given["block_size"], given["max_model_len"], given.get("max_num_batched_tokens", 0)
        made["max_blocks_per_request"] = groups.max_blocks_per_request(kind_of(given), *limits)
    if "available_bytes" in given:
        made["num_blocks"] = groups.num_blocks_in(given["available_bytes"], page, given["num_layers"])
    return made


def skipped_blocks(given: Given) -> dict[str, Any]:
    kind, computed = kind_of(given), given["num_computed_tokens"]
    return {
        "num_skipped_tokens": groups.skipped_tokens(kind, computed).tolist(),
        "num_freed_blocks": groups.skipped_blocks(kind, given["block_size"], computed).tolist(),
    }


def _hit(kind: KVKind, given: Given) -> dict[str, Any]:
    hit = groups.longest_hit(kind, given["block_size"], given["cached"])
    return {"hit_blocks": hit, "used_blocks": list(groups.used_blocks(kind, given["block_size"], hit))}


def sliding_window_hit(given: Given) -> dict[str, Any]:
    return _hit(SlidingWindow(given["sliding_window"]), given)


def chunked_local_hit(given: Given) -> dict[str, Any]:
    return _hit(ChunkedLocal(given["attention_chunk_size"]), given)


def hybrid_hit(given: Given) -> dict[str, Any]:
    kinds = [(kind_of(group), group.get("block_size", given["block_size"])) for group in given["groups"]]
    tokens, drop = given["num_prompt_tokens"], given["drop_last_block"]
    return {"hit_tokens": groups.hybrid_hit(kinds, given["cached"], tokens, drop)}


def common_prefix_blocks(given: Given) -> dict[str, Any]:
    return {"num_common_prefix_blocks": groups.common_prefix_blocks(given["block_tables"])}


# What a query sees, and context parallelism -------------------------------------------------------------------------


def attention_visibility(given: Given) -> dict[str, Any]:
    """One range a query here; a peer's list of ranges has one each."""
    kind = {"causal": "full", "prefix_image": "full"}.get(given["kind"], given["kind"])
    seen = EncoderOnly() if kind == "bidirectional" else kind_of({**given, "kind": kind})
    images = [tuple(each) for each in given.get("image_ranges", ())]
    made = visibility.visible_keys(seen, given["query_positions"], given["seq_len"], images)
    return {"visible": [[each] for each in made.tolist()]}


def chunked_local_virtual_batches(given: Given) -> dict[str, Any]:
    sizes = given["attention_chunk_size"], given["block_size"]
    table = np.array(given["block_table"], np.int32)
    made = visibility.chunked_local_batch(given["query_lens"], given["seq_lens"], *sizes, table)
    return {name: getattr(made, name).tolist() for name in ("query_lens", "seq_lens", "block_table")}


def dcp_local_seq_lens(given: Given) -> dict[str, Any]:
    sizes = given["dcp_size"], given["interleave"]
    return {"local_seq_lens": context_parallel.local_seq_lens(given["seq_lens"], *sizes).tolist()}


def pcp_head_tail_split(given: Given) -> dict[str, Any]:
    ranks = context_parallel.head_tail_split(given["num_tokens"], given["pcp_size"])
    return {"ranks": [{"head": _range(head), "tail": _range(tail)} for head, tail in ranks]}


def _range(part: tuple[int, int] | None) -> list[int] | None:
    return None if part is None else list(part)


# Images and videos in a prompt --------------------------------------------------------------------------------------


def mrope_positions(given: Given) -> dict[str, Any]:
    grids = [
        positions.Grid(each["offset"], tuple(each["grid_thw"]), each.get("t_factor", 1.0)) for each in given["items"]
    ]
    made = positions.mrope_positions(given["num_tokens"], grids, given["spatial_merge_size"])
    return {"positions": made.prompt.tolist(), "delta": made.delta}


def image_chunk_clip(given: Given) -> dict[str, Any]:
    items = [(each["offset"], each["length"]) for each in given["items"]]
    clips = positions.clip_items(given["num_computed_tokens"], given["num_scheduled_tokens"], items)
    return {"clips": [None if clip is None else _clip(clip) for clip in clips]}


def _clip(clip: positions.Clip) -> dict[str, list[int]]:
    return {"feature_range": list(clip.feature_range), "token_range": list(clip.token_range)}


GROUP_ADAPTERS: Mapping[str, Callable[[Given], dict[str, Any]]] = MappingProxyType(
    {
        "attention_state": attention_state,
        "image_chunk_clip": image_chunk_clip,
        "mrope_positions": mrope_positions,
        "pcp_head_tail_split": pcp_head_tail_split,
        "dcp_local_seq_lens": dcp_local_seq_lens,
        "chunked_local_virtual_batches": chunked_local_virtual_batches,
        "attention_visibility": attention_visibility,
        "common_prefix_blocks": common_prefix_blocks,
        "hybrid_hit": hybrid_hit,
        "chunked_local_hit": chunked_local_hit,
        "sliding_window_hit": sliding_window_hit,
        "skipped_blocks": skipped_blocks,
        "kv_page_plan": kv_page_plan,
        "kv_unify_page_size": kv_unify_page_size,
        "kv_groups": kv_groups,
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
