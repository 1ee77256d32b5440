"""Prompts for SmolLM2-135M-Instruct, whose texts `scripts/record_smollm2.py` records from transformers."""

from pathlib import Path

GOLDENS = Path(__file__).parent / "goldens" / "smollm2.json"
NUM_TOKENS = 32
QUESTIONS = (
    "What is the capital of France?",
    "Why is the sky blue?",
    "Write a Python function that adds two numbers.",
    "Explain in one sentence what a compiler does.",
    "Name three fruits.",
    "Translate to French: the cat sleeps.",
    "How do I make a cup of tea?",
    "Summarise: The fox saw the grapes, could not reach them, and said that they were sour.",
    "What is 12 plus 30?",
    "List the days of the week.",
    "Who wrote Hamlet?",
    "Extract the name: my name is Ada, and I live in London.",
)
TEXTS = (  # which the model continues, without a chat template
    "def fibonacci(n):\n",
    "import os\nimport sys\n\n\nclass Stack:\n    def __init__(self):",
    "Once upon a time, there was a",
    "it's  naïve — ß 漢字 🙂",
    "1, 2, 3, 4, 5, 6,",
    "| name | age |\n|---|---|\n| Ann | 31 |\n",
    "The water cycle begins when",
    '{"name": "Ann", "age": 31, "city":',
)
CHAT = (  # the questions of one conversation
    "My name is Ada and my favourite colour is green. Please greet me, and then tell me something about the colour.",
    "What is my name? Answer in a whole sentence, and say which colour I like.",
    "Now write two sentences about the sea for me, as a teacher would write them on a blackboard in a school.",
)
