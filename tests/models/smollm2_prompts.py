"""What the default model is asked in the tests of this folder: 20 prompts."""

QUESTIONS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "What is 17 + 25? Explain step by step.",
    "Name three primary colors.",
    "Translate 'good morning' to Spanish.",
    "Who wrote Romeo and Juliet?",
    "Give me a recipe for pancakes.",
    "Why is the sky blue?",
    "Write a Python function that adds two numbers.",
    "List the planets of the solar system in order.",
    "In 1969, what happened on July 20?",
    "Summarize the water cycle in two sentences.",
]
TEXTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village far away,",
    "1, 2, 3, 4, 5,",
    "The three laws of thermodynamics are:\n1.",
    "# Shopping list\n- eggs\n- ",
    "Ünïcödé and 漢字 and emoji 🙂 are",
    "A long text begins. " + "The quick brown fox jumps over the lazy dog. " * 20 + "In short,",
]
NUM_TOKENS = 64
