"""Documents to read and questions to ask about them."""
