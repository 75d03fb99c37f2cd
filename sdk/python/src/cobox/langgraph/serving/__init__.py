"""The protocol's routes served by a LangGraph deployment: who calls, what they may, and the way on to the broker."""
