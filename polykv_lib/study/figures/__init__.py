"""Rows in, figures out: one style, one function a figure; nothing here computes a result."""

from polykv_lib.study.figures.write import FIGURES, write_all

__all__ = ["FIGURES", "write_all"]
