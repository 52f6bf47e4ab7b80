"""Words of the synthetic catalogue: brands, adjectives, and sub-categories in their categories."""

from __future__ import annotations

from rft_genrec.catalogue.records import Item

BRANDS = ("Norvik", "Tavola", "Bremer", "Quillon", "Asahina", "Delmont", "Ostara", "Kestrel")
ADJECTIVES = (
    *("compact", "heavy-duty", "foldable", "stainless", "wireless", "quiet", "waterproof", "adjustable"),
    *("magnetic", "portable", "insulated", "premium", "slim", "rugged", "classic"),
)
SUB_CATEGORIES: dict[str, tuple[str, ...]] = {
    "garden": ("pruning shears", "watering can", "garden hose", "seed tray", "lawn rake", "plant pot"),
    "kitchen": ("frying pan", "bread knife", "cutting board", "coffee grinder", "mixing bowl", "kettle"),
    "workshop": ("claw hammer", "hand saw", "screwdriver set", "bench vise", "power drill", "tape measure"),
    "camping": ("two-person tent", "sleeping bag", "camping stove", "headlamp", "water filter", "trekking pole"),
    "office": ("fountain pen", "desk lamp", "paper shredder", "label printer", "document tray", "stapler"),
    "music": ("guitar strap", "drum sticks", "violin bow", "music stand", "microphone", "metronome"),
    "fitness": ("yoga mat", "kettlebell", "jump rope", "foam roller", "resistance band", "rowing machine"),
    "bathroom": ("shower head", "bath towel", "soap dispenser", "toothbrush holder", "bath scale", "mirror cabinet"),
    "bicycle": ("bicycle pump", "chain oil", "bike helmet", "saddle bag", "rear light", "brake pads"),
    "painting": ("acrylic paint", "canvas panel", "brush set", "easel", "palette knife", "sketch pad"),
}
"""Six sub-categories of each category."""


def item_texts(sub: int, brand: int, number: int) -> Item:
    """Return the texts of an item: they tell its sub-category and brand, and nothing of who buys it.

    Args:
        sub: number of the sub-category, counted over all categories.
        brand: number of the brand.
        number: number of the item in its sub-category, which gives the adjective.
    """
    category, name = [(category, name) for category, names in SUB_CATEGORIES.items() for name in names][sub]
    adjective = ADJECTIVES[number % len(ADJECTIVES)]
    return Item(
        title=f"{BRANDS[brand]} {adjective} {name}",
        description=f"A {adjective} {name} by {BRANDS[brand]}, one of its products for {category}.",
        brand=BRANDS[brand],
        categories=(category, name),
    )
