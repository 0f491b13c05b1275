"""What the papers print: their numbers as rows, what those count, what each score is a score of."""

from polykv_lib.study.published.numbers import (
    POOL,
    SHAPES,
    Published,
    cached_tokens,
    copy_gb,
    pool_formats,
    pool_gb,
    published_rows,
    scored_tokens,
)

__all__ = [
    "POOL",
    "SHAPES",
    "Published",
    "cached_tokens",
    "copy_gb",
    "pool_formats",
    "pool_gb",
    "published_rows",
    "scored_tokens",
]
