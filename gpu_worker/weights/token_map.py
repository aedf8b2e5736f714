"""Token maps: which id each token has, and whether a draft model speaks the target's ids."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from gpu_worker.errors import ModelError


def read_token_map(directory: Path) -> dict[str, int]:
    """Token -> id of the tokenizer in `directory`, added tokens included; ModelError for an unusable file."""
    path = directory / "tokenizer.json"
    try:
        return Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True)
    except Exception as error:  # the library raises no narrower one
        raise ModelError(f"{path}: cannot be read as a tokenizer: {error}") from error


def usable_vocabulary(token_map: dict[str, int]) -> int:
    """One more than the highest id that a token has: the ids a model may give."""
    return max(token_map.values(), default=-1) + 1


def check_same_token_map(target_dir: Path, draft_dir: Path) -> int:
    """Makes sure that two tokenizers give every token the same id; sizes of padded embeddings play no part.

    Both directories hold a tokenizer.json. Returns the usable vocabulary size. Raises ModelError naming the
    first token (by id) that differs and its id in both.
    """
    target = read_token_map(target_dir)
    if target_dir.resolve() == draft_dir.resolve():
        return usable_vocabulary(target)
    draft = read_token_map(draft_dir)
    differing = [
        (min(target.get(token, draft.get(token, 0)), draft.get(token, target.get(token, 0))), token)
        for token in target.keys() | draft.keys()
        if target.get(token) != draft.get(token)
    ]
    if differing:
        _, token = min(differing)
        raise ModelError(
            f"draft tokenizer {draft_dir} is not the target's {target_dir}: token {token!r} has id"
            f" {draft.get(token, 'none')} in the draft and {target.get(token, 'none')} in the target"
            f" ({len(differing)} tokens differ)"
        )
    return usable_vocabulary(target)
