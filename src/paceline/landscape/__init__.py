"""`paceline landscape` and `paceline sharpness`: the loss around a trained model, as files in its record and as pictures.

Owns the pictures in PNG and SVG files. May import: files, errors. Start reading at `picture.py`.
"""
