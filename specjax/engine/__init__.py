"""The engine from text to text: requests, tokenizers, chat templates, and the text of generated tokens."""
