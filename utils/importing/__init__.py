"""`python -m utils.importing FILE`: another toolkit's config becomes our two recipes.

toolkits     what keys of axolotl, LLaMA-Factory and TRL mean; a config on its way
sources      the datasets that it names -> the data recipe
conversion   everything else -> the training recipe; what has no counterpart, with the reason
__main__     prints both recipes, or writes them into a folder
"""
