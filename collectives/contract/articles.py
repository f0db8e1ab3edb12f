"""The article of a name in an error: "an AdamW", "a Linear", "an SGD"."""

from __future__ import annotations


def with_article(name: str | type) -> str:
    """name: or the class of that name."""
    name = name.__name__ if isinstance(name, type) else name
    is_spelt = name[:2].isupper()  # Read letter by letter, as the S of SGD.
    begins_with_vowel = name[:1].lower() in ("a", "e", "i", "o") or (
        name[:1] in "FHLMNRSX" if is_spelt else name[:2].lower() in ("up", "un", "ul")
    )
    return f"{'an' if begins_with_vowel else 'a'} {name}"
