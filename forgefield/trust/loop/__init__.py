"""The learning loop: explore with molecular dynamics, select uncertain structures, label them, train, repeat."""
