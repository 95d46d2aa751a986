"""The byte-level GPT that scripts/train_gpt.py trains."""
