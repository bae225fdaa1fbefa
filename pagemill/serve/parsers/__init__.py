"""Parts of an assistant's message: content, reasoning and tool calls, told apart while the text arrives."""
