"""The way of a predict from the API to a predict worker and back."""
