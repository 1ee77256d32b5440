"""Text in, text out: requests, tokenizers, chat templates, and the text of the tokens that come back."""
