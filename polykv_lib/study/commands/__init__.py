"""The console's larger commands, each a file: `polykv bench`, `polykv kaggle`."""
