"""The OpenAI protocol on the engine: bodies of requests and answers, and files of requests."""
