// Prints the IPv4 addresses of a name as a Node program gets them, or "no such name".
require("dns").lookup(process.argv[2], { family: 4, all: true }, (error, found) => {
  if (error && error.code === "ENOTFOUND") {
    console.log("no such name");
  } else if (error) {
    console.log(error.code);
  } else {
    for (const { address } of found) console.log(address);
  }
});
