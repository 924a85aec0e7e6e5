"""The TabICL family: weights, fit, frozen state, lean predict."""
