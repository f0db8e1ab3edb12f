"""What each word after `chorusline` does; `runtime/command_line.py` chooses between them."""
