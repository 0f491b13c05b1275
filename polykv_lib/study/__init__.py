"""Numbers to rows to tables and figures: parameters, runner, store. Importing it never imports torch."""
