"""Rows in, tables out: our numbers, every published number beside ours, and the README's lines."""

from polykv_lib.study.tables.write import BEGIN, END, all_tables, fill_readme, summary, write_all

__all__ = ["BEGIN", "END", "all_tables", "fill_readme", "summary", "write_all"]
