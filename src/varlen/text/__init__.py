"""Chats in: messages and a tokenizer's template to text, and which characters of it the assistant said."""
