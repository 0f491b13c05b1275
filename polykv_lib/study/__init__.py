"""Numbers to rows, to tables, to figures. Outside `experiments` nothing here needs torch."""
