"""What a client adds to a conversation: its system prompt, tools, reminders, and parameters.

Logs of older clients have only the conversation. The rest is recorded from the client itself: it is
started against a server on loopback, and sends its complete request.
"""
