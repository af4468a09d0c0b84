from main import add

assert add(1, 2) == 3, f"add(1, 2) is {add(1, 2)}, not 3"
print("passed")
