"""Food-101 (Bossard et al., "Food-101 - Mining Discriminative Components with Random Forests", ECCV 2014)."""

from datamodules.coop_layout import DownloadableCoOpSource


class Food101(DownloadableCoOpSource):
    """101 dishes, 50,500 train and 30,300 test images; CoOp does not use the official split."""

    title = "Food-101"
    home = "https://data.vision.ee.ethz.ch/cvl/datasets_extra/food-101/"
    folders = ("food-101",)
    images = "images"
    layout = "images/<class>/*.jpg"
    split_name = "Food101"
    sizes = (50500, 30300)
    template = "a photo of {}, a type of food."
    # fmt: off
    class_names = (
        "apple pie", "baby back ribs", "baklava", "beef carpaccio", "beef tartare", "beet salad", "beignets",
        "bibimbap", "bread pudding", "breakfast burrito", "bruschetta", "caesar salad", "cannoli", "caprese salad",
        "carrot cake", "ceviche", "cheese plate", "cheesecake", "chicken curry", "chicken quesadilla", "chicken wings",
        "chocolate cake", "chocolate mousse", "churros", "clam chowder", "club sandwich", "crab cakes", "creme brulee",
        "croque madame", "cup cakes", "deviled eggs", "donuts", "dumplings", "edamame", "eggs benedict", "escargots",
        "falafel", "filet mignon", "fish and chips", "foie gras", "french fries", "french onion soup", "french toast",
        "fried calamari", "fried rice", "frozen yogurt", "garlic bread", "gnocchi", "greek salad",
        "grilled cheese sandwich", "grilled salmon", "guacamole", "gyoza", "hamburger", "hot and sour soup", "hot dog",
        "huevos rancheros", "hummus", "ice cream", "lasagna", "lobster bisque", "lobster roll sandwich",
        "macaroni and cheese", "macarons", "miso soup", "mussels", "nachos", "omelette", "onion rings", "oysters",
        "pad thai", "paella", "pancakes", "panna cotta", "peking duck", "pho", "pizza", "pork chop", "poutine",
        "prime rib", "pulled pork sandwich", "ramen", "ravioli", "red velvet cake", "risotto", "samosa", "sashimi",
        "scallops", "seaweed salad", "shrimp and grits", "spaghetti bolognese", "spaghetti carbonara", "spring rolls",
        "steak", "strawberry shortcake", "sushi", "tacos", "takoyaki", "tiramisu", "tuna tartare", "waffles",
    )
    # fmt: on

    def fetch(self) -> None:
        """Let torchvision download it to ``<root>/food-101``."""
        from torchvision import datasets  # slow to import

        datasets.Food101(self.root, download=True)
