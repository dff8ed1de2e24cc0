"""Everything that draws.

parts                       the figures as data: which runs each is drawn from
draw                        a figure by its name, from records or models to a file
curves, pictures, measures  from records; of models, pixel by pixel; of models, as numbers
neighborhoods               from the formulas
style                       what all figures share
"""
