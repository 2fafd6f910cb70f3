"""Branchout from Python: a model of 800 characters learns five more. Needs no download; takes about ten seconds.

python examples/api_in_15_lines.py
"""

import branchout
from branchout.data.glyphs import faces_of_classes, glyphs

if __name__ == "__main__":  # photographs are decoded by worker processes, which import this file again
    base = branchout.load("glyphs")  # or a saved model's folder, "efficientnet_lite0", a timm name
    new = [name for name in faces_of_classes() if name not in base.classes][:5]
    learn = glyphs(20, 10, classes=new)  # or "new_photos/": a folder with one folder per class
    kept = glyphs(5, 2, classes=base.classes[:100])  # or "old_photos/": exemplars of the old classes

    model = base.extend(learn.train, memory=kept.train, epochs=3, views=1)  # out="v2/" saves it
    print(f"{len(base.classes)} classes, now {len(model.classes)}")
    print("a new character:", learn.val.names[0], "→", model.predict(learn.val.read(0), top=2))
    for goal in ("all", "avg"):  # choosing another operating point trains nothing
        model.tune(goal)
        print(f"tuned for {goal}: {model.evaluate(learn.val).after.all:.0%} of the new images are right,",
              f"{model.evaluate(kept.val).after.all:.0%} of the old images")  # fmt: skip
