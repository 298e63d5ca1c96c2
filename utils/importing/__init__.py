"""`python -m utils.importing FILE`: convert another toolkit's config to our two recipes.

toolkits     the keys of axolotl, LLaMA-Factory and TRL; the state of a conversion
sources      converts the datasets of a config to the data recipe
conversion   converts all other keys to the training recipe; notes keys without a counterpart
__main__     prints both recipes, or writes them into a folder
"""
