"""Text and token ids, without torch and transformers: tokenizers and prompt templates."""
