"""Steps on clusters that need not be at hand: described by flags, predicted, compared."""
