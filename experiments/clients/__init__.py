"""The study `clients`: quantizers in a modern tokenizer, its runs, and other regimes."""
