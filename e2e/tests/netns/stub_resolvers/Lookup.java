// Prints the addresses of a name as a Java program gets them, or "no such name".
import java.net.InetAddress;
import java.net.UnknownHostException;

class Lookup {
    public static void main(String[] args) {
        try {
            for (InetAddress address : InetAddress.getAllByName(args[0])) {
                System.out.println(address.getHostAddress());
            }
        } catch (UnknownHostException e) {
            System.out.println("no such name");
        }
    }
}
